#include "ops/state_pool.h"

#include <cstring>
#include <memory>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace chunkdelta {
namespace {

mx::Shape slot_shape(const mx::array& pool) {
  return mx::Shape(pool.shape().begin() + 1, pool.shape().end());
}

size_t slot_bytes(const mx::array& pool) {
  return pool.shape(0) ? pool.nbytes() / pool.shape(0) : 0;
}

void check_dense(const mx::array& pool) {
  if (!pool.flags().row_contiguous) throw std::runtime_error("[StatePool] expected a dense pool");
}

}  // namespace

std::pair<mx::array, mx::array> read_state(const mx::array& pool, int slot) {
  refuse_tracing("StatePool.read");
  const auto out = mx::array::make_arrays(
      {slot_shape(pool), {1}}, {pool.dtype(), mx::uint8},
      std::make_shared<ReadState>(mx::default_stream(mx::Device::cpu), slot), {pool});
  return {out[0], out[1]};
}

mx::array write_state(const mx::array& pool, int slot, const mx::array& value) {
  refuse_tracing("StatePool.write");
  const mx::Stream s = mx::default_stream(mx::Device::cpu);
  return mx::array(pool.shape(), pool.dtype(), std::make_shared<WriteState>(s, slot),
                   {pool, dense(value, s)});
}

void ReadState::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  check_dense(inputs[0]);
  for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
  const size_t bytes = slot_bytes(inputs[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.set_input_array(inputs[0]);
  for (mx::array& output : outputs) encoder.set_output_array(output);
  encoder.dispatch([from = inputs[0].data<char>() + slot_ * bytes, to = outputs[0].data<char>(),
                    token = outputs[1].data<char>(), bytes] {
    std::memcpy(to, from, bytes);
    *token = 0;
  });
}

void ReadState::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[read_state] expected a CPU stream; got a GPU stream");
}

void WriteState::eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) {
  check_dense(inputs[0]);
  output.copy_shared_buffer(inputs[0]);  // in place, whoever else holds the buffer
  const size_t bytes = slot_bytes(inputs[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(output);
  encoder.dispatch([from = inputs[1].data<char>(), to = output.data<char>() + slot_ * bytes,
                    bytes] { std::memcpy(to, from, bytes); });
}

void WriteState::eval_gpu(const std::vector<mx::array>&, mx::array&) {
  throw std::runtime_error("[write_state] expected a CPU stream; got a GPU stream");
}

}  // namespace chunkdelta
