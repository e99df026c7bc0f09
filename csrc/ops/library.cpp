// Registers the kernels with PyTorch's dispatcher, over LibTorch's stable ABI alone, so that one
// library serves every torch from 2.10 on and every Python.
//
// The schemas are in megatron/ops/*.py. Nothing is registered when the library is loaded: Python
// first compares `megatron_ops_interface` with its own number, then calls `megatron_ops_register`.
#include <cstdlib>
#include <string_view>

#include "operators.h"

namespace megatron {

void register_activations(StableLibrary& library);
void register_adamw(StableLibrary& library);
void register_attention(StableLibrary& library);
void register_dropout(StableLibrary& library);
void register_norms(StableLibrary& library);
void register_losses(StableLibrary& library);
void register_paged(StableLibrary& library);
void register_products(StableLibrary& library);
void register_rotary(StableLibrary& library);

static InstructionSet best_instruction_set() {
#if defined(__x86_64__)
  const char* value = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string_view limit = value == nullptr ? "avx512" : value;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && limit != "avx2" && limit != "default") return InstructionSet::avx512;
  if (has_avx2 && limit != "default") return InstructionSet::avx2;
#endif
  return InstructionSet::plain;
}

InstructionSet instruction_set() {
  static const InstructionSet best = best_instruction_set();
  return best;
}

static StableLibrary& register_for(const char* dispatch_key) {
  // Never deleted: the kernels stay for the life of the process.
  auto* library = new StableLibrary(
      StableLibrary::Kind::IMPL, "megatron", dispatch_key, __FILE__, __LINE__);
  register_activations(*library);
  register_norms(*library);
  register_adamw(*library);
  register_dropout(*library);
  register_losses(*library);
  register_rotary(*library);
  return *library;
}

}  // namespace megatron

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Changes with the schemas, or with what they mean; megatron/ops/library.py has the same number.
EXPORTED int64_t megatron_ops_interface() { return 12; }

EXPORTED const char* megatron_ops_instruction_set() {
  switch (megatron::instruction_set()) {
    case megatron::InstructionSet::avx512:
      return "avx512";
    case megatron::InstructionSet::avx2:
      return "avx2";
    default:
      return "plain";
  }
}

EXPORTED void megatron_ops_register() {
  megatron::StableLibrary& cpu = megatron::register_for("CPU");
  megatron::register_attention(cpu);
  megatron::register_paged(cpu);
  megatron::register_products(cpu);
#ifdef MEGATRON_OPS_CUDA
  megatron::register_for("CUDA");
#endif
}
