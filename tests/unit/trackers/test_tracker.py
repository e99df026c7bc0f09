"""Every service has a flag, and its library is imported by the tracker that is opened alone."""

import subprocess
import sys

from megatron.config.fields import field_names
from megatron.config.trackers import TrackersConfig
from megatron.trackers.reporting import SERVICES


def test_every_service_has_a_flag_of_its_own() -> None:
    fields = [service.field for service in SERVICES]
    assert len(set(fields)) == len(fields)
    assert set(fields) <= set(field_names(TrackersConfig))


def test_libraries_are_not_imported_by_runs_without_them() -> None:
    packages = {service.package for service in SERVICES} | {"torch"}
    program = "import sys, megatron.trackers.reporting; print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert not packages & set(listed.stdout.decode().split())
