// What the ops on pools (KVPages, StatePool) share: pools are written in place, so a transformation
// that would trace, repeat or merge a write must be refused before a node is built.
#pragma once

#include <string_view>

#include "ops/checks.h"

namespace chunkdelta {

// Whether this thread is inside mx.compile, mx.grad or mx.vmap.
inline bool tracing() {
  // MLX exports no query; a marked array answers for the transformation around it.
  mx::array probe(0.0f);
  probe.set_tracer(true);
  return probe.is_tracer();
}

inline void refuse_tracing(std::string_view op) {
  if (tracing()) {
    refuse(op, "a call outside mx.compile, mx.grad and mx.vmap: the pool is written in place",
           "a traced call");
  }
}

}  // namespace chunkdelta
