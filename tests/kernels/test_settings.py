"""The table of settings, which Python writes and C++ and Triton read: hdet/kernels/spec/settings.py and csrc/core/hyper.h."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdet import _C
from hdet.kernels import StepOptions, StepSettings
from hdet.kernels.spec.settings import CALL_SETTINGS, ROW_SETTINGS, count_settings, settings_numbers

from ..limits import HANG_S

HYPER = Path(__file__).parents[2] / "csrc/core/hyper.h"


def test_fields_stand_in_the_order_of_the_kernels() -> None:
    found = re.search(r"struct RowSettings \{(.*?)\n\};", HYPER.read_text(), re.DOTALL)
    assert found is not None
    fields = [field for field in StepSettings._fields if field != "multipliers"]
    assert re.findall(r"^  double (\w+);", found[1], re.MULTILINE) == fields
    assert (_C.CALL_SETTINGS, _C.ROW_SETTINGS) == (CALL_SETTINGS, ROW_SETTINGS) == (1, len(fields))


def test_the_table() -> None:
    rows = [
        StepSettings(0.5, (1.0, 2.0), 0.1, 0.2, 0.3, 0.4, 0.6, True, False, True),
        StepSettings(torch.tensor(7.0), (3.0, 4.0)),  # in device memory: its place here is not read
    ]
    numbers = settings_numbers(rows, StepOptions(max_norm=8.0))
    assert numbers[0] == 8.0
    assert numbers[1:10] == [0.5, 0.1, 0.2, 0.3, 0.4, 0.6, True, False, True]
    assert numbers[10:19] == [0.0] * 9
    assert numbers[19:] == [1.0, 2.0, 3.0, 4.0]
    assert len(numbers) == count_settings(2, 2)


OTHER_BUILD = """
import sys, types
sys.modules["hdet._C"] = types.SimpleNamespace(INTERFACE={interface}, CALL_SETTINGS={call}, ROW_SETTINGS={row})
from hdet.kernels import native
print(native.missing)
"""


@pytest.mark.parametrize(("more_interface", "more_call", "more_row"), [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)])
def test_a_module_built_with_another_table_is_not_used(more_interface: int, more_call: int, more_row: int) -> None:
    script = OTHER_BUILD.format(interface=_C.INTERFACE + more_interface, call=CALL_SETTINGS + more_call, row=ROW_SETTINGS + more_row)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    other = bool(more_interface or more_call or more_row)
    assert ("built from other sources: reinstall hdet" in done.stdout) == other, done.stdout
