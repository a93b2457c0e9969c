"""The error of the drift that a ledger's summary shows."""

from types import SimpleNamespace
from typing import Any

import pytest

from stormtorch.telemetry.ledger import _error

pytestmark = pytest.mark.pure


def test_the_error_of_the_drift_is_that_of_the_mean_of_ten_parts() -> None:
    rows: Any = [SimpleNamespace(pair_drift=float(number // 10), lag={0: 32}) for number in range(100)]
    assert _error(rows) == pytest.approx((82.5 / 90) ** 0.5)
    assert _error(rows[:99]) is None
