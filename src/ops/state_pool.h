// Slots of a StatePool, one at a time.
#pragma once

#include <utility>

#include "mlx/primitives.h"
#include "ops/pool.h"

namespace chunkdelta {

// A copy of pool[slot] and the token of the read: one byte that exists when the copy does.
std::pair<mx::array, mx::array> read_state(const mx::array& pool, int slot);

// The pool with pool[slot] = value, in the same memory.
mx::array write_state(const mx::array& pool, int slot, const mx::array& value);

// Both run on the CPU: a slot is small, and host and GPU share the memory.
class ReadState : public mx::Primitive {
 public:
  ReadState(mx::Stream stream, int slot) : mx::Primitive(stream), slot_(slot) {}
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "chunkdelta::ReadState"; }

 private:
  int slot_;
};

class WriteState : public mx::UnaryPrimitive {
 public:
  WriteState(mx::Stream stream, int slot) : mx::UnaryPrimitive(stream), slot_(slot) {}
  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  const char* name() const override { return "chunkdelta::WriteState"; }

 private:
  int slot_;
};

}  // namespace chunkdelta
