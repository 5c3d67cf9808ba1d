# Fails when an object compiled for one instruction set defines a weak symbol: the linker keeps one
# definition for the whole extension, and it might be the one that this CPU cannot run (core/simd.h).
#   cmake -DNM=nm -DOBJECTS="a.o;b.o" -P check_isa_symbols.cmake
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  if(symbols MATCHES "[0-9a-f]+ ([WVu]) ([^\n]+)")
    message(FATAL_ERROR "${object} defines the weak symbol ${CMAKE_MATCH_2}: make it static inline")
  endif()
endforeach()
