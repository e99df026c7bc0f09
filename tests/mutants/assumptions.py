"""Mutants of checks that the registry of assumptions names (docs/assumptions.toml)."""

from tests.mutants.mutant import Mutant

_PROBE = "megatron/preflight/probe.py"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "assumptions": (
        Mutant(
            "a run probes its machine once the ranks have joined",
            "megatron/initialize.py",
            "        probe_machine(dtypes_of(config.precision), unchecked)\n",
            "",
            "tests/distributed/preflight/test_probe.py::"
            "test_a_rank_that_computes_or_communicates_wrongly_is_named_by_all",
        ),
        Mutant(
            "one wrong element of a product is found",
            _PROBE,
            '    if wrong:\n        return f"{name} in',
            '    if wrong > _SIDE:\n        return f"{name} in',
            "tests/unit/preflight/test_probe.py::test_one_wrong_element_is_found_and_named",
        ),
        Mutant(
            "a part that is missing in a sum is found",
            _PROBE,
            "(result != 1)",
            "(result > 1)",
            "tests/distributed/preflight/test_probe.py::"
            "test_a_rank_that_computes_or_communicates_wrongly_is_named_by_all",
        ),
        Mutant(
            "the dtype of the model is probed",
            _PROBE,
            "(precision.precision.value, precision.gradient_precision.value, ",
            "(precision.gradient_precision.value, ",
            "tests/unit/preflight/test_probe.py::test_the_dtypes_are_those_of_the_run",
        ),
        Mutant(
            "versions of a GPU's libraries are compared between ranks",
            "megatron/device.py",
            "    return versions\n",
            "    return {}\n",
            "tests/unit/test_device.py::test_versions_of_the_libraries_of_a_gpu_are_known",
        ),
    ),
}
