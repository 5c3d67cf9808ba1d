# Toolchain: the macOS arm64 extension, compiled and linked on any machine with ziglang's clang. For
# checks only (cmake/cross_link.py): Python.h is the host's and libc++ is zig's, so never ship it.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_SYSTEM_VERSION 23.0.0)
set(CMAKE_OSX_DEPLOYMENT_TARGET "14.0" CACHE STRING "" FORCE)
set(CMAKE_OSX_SYSROOT "" CACHE STRING "" FORCE)
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/zig/c++)
set(CMAKE_AR ${CMAKE_CURRENT_LIST_DIR}/zig/ar)
set(CMAKE_RANLIB ${CMAKE_CURRENT_LIST_DIR}/zig/ranlib)
set(CMAKE_INSTALL_NAME_TOOL true)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)
# The two Apple headers that MLX's need and zig does not ship.
include_directories(SYSTEM ${CMAKE_CURRENT_LIST_DIR}/macos-stubs)
