"""Mutants of products of matrices on CPUs, and of the memory of tensors there."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "products on CPUs": (
        Mutant(
            "a product that is widened in blocks has its bias once",
            "megatron/ops/cpu_products.py",
            "torch.addmm(wide_bias[block], wide,",
            "torch.mm(wide,",
            "tests/unit/ops/test_cpu_products.py::test_a_product_is_rounded_once",
        ),
        Mutant(
            "a widened product is the sum over all blocks",
            "megatron/ops/cpu_products.py",
            "torch.addmm(total, a[:, block].float(), b[block].float(), out=total)",
            "total.copy_(a[:, block].float() @ b[block].float())",
            "tests/unit/ops/test_cpu_products.py::test_a_product_is_rounded_once",
        ),
        Mutant(
            "a gradient in half precision is multiplied in fp32 where the CPU has no instructions",
            "megatron/mpu/weight_gradients.py",
            "if total.dtype == rows_out.dtype and not is_widened(rows_out):",
            "if True:",
            "tests/unit/ops/test_cpu_products.py::"
            "test_gradients_of_weights_are_added_up_in_the_dtype_of_the_sum",
        ),
        Mutant(
            "attention gives back the dtype of its queries",
            "megatron/ops/attention.py",
            "    return out.to(dtype)\n",
            "    return out\n",
            "tests/unit/ops/test_cpu_products.py::test_attention_has_the_gradients_of_fp32",
        ),
        Mutant(
            "oneDNN multiplies fp32 no longer when the run has ended",
            "megatron/ops/cpu_products.py",
            'undo = partial(setattr, _FP32, "fp32_precision", before)',
            "undo = partial(str, before)",
            "tests/unit/ops/test_cpu_products.py::test_onednn_multiplies_until_that_is_undone",
        ),
        Mutant(
            "MKL multiplies fp32 where oneDNN rounds operands",
            "megatron/ops/cpu_products.py",
            "if not fp32_products_are_exact():",
            "if False:",
            "tests/unit/ops/test_cpu_products.py::test_mkl_multiplies_where_onednn_rounds",
        ),
        Mutant(
            "a precision of fp32 products that somebody has set stays",
            "megatron/ops/cpu_products.py",
            "        before == _NOT_SET\n        and is_large",
            "        is_large",
            "tests/unit/ops/test_cpu_products.py::test_a_precision_that_somebody_has_set_stays",
        ),
        Mutant(
            "products of whole numbers show that the second operand is rounded, too",
            "megatron/ops/cpu_products.py",
            "or not torch.equal((b.t() @ a.t()).t(), exact)",
            "",
            "tests/unit/ops/test_cpu_products.py::test_a_product_with_rounded_operands_is_noticed",
        ),
        Mutant(
            "a CPU that may round by AMX is left to MKL",
            "megatron/ops/cpu_products.py",
            " and not may_round",
            "",
            "tests/unit/ops/test_cpu_products.py::"
            "test_onednn_is_for_wide_instructions_of_others_than_intel",
        ),
        Mutant(
            "small matrices are left to MKL",
            "megatron/initialize.py",
            "tokens=config.data.seq_length // config.parallel.context_parallel_size,",
            "tokens=2**40,",
            "tests/unit/test_initialize.py::"
            "test_a_run_on_a_cpu_takes_the_faster_library_until_the_shutdown",
        ),
        Mutant(
            "the library of fp32 products is recorded",
            "megatron/ops/library.py",
            "if (products := fp32_library()) != MKL:",
            "if False:",
            "tests/unit/ops/test_library.py::test_a_training_with_kernels_says_which",
        ),
    ),
    "memory of tensors on CPUs": (
        Mutant(
            "memory is of the torch that it was compiled for",
            "megatron/ops/cpu_memory.py",
            'if built_for != version.partition("+")[0]:',
            "if False:",
            "tests/unit/ops/test_cpu_memory.py::test_a_library_that_does_not_fit_is_not_used",
        ),
        Mutant(
            "a library that cannot be loaded is not used",
            "megatron/ops/cpu_memory.py",
            "except (OSError, AttributeError) as error:",
            "except AttributeError as error:",
            "tests/unit/ops/test_cpu_memory.py::test_a_library_that_does_not_fit_is_not_used",
        ),
        Mutant(
            "tensors are kept together until that is undone",
            "megatron/ops/cpu_memory.py",
            "    return library.megatron_cpu_memory_stop\n",
            "    return _nothing\n",
            "tests/unit/ops/test_cpu_memory.py::test_a_process_of_its_own[undone]",
        ),
        Mutant(
            "other systems are left alone",
            "megatron/ops/cpu_memory.py",
            '    if sys.platform != "linux":\n        return _nothing\n',
            "",
            "tests/unit/ops/test_cpu_memory.py::test_a_process_of_its_own[other system]",
        ),
        Mutant(
            "a run on a CPU keeps tensors together until its shutdown",
            "megatron/initialize.py",
            "_ON_SHUTDOWN.append(keep_tensors_together())",
            "keep_tensors_together()",
            "tests/unit/test_initialize.py::"
            "test_a_run_on_a_cpu_keeps_tensors_together_until_the_shutdown",
        ),
    ),
}
