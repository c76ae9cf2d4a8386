"""What holds of a log whatever happens to it: the cleaner's invariants, in one random machine.

tests/support/cleaner/partition_machine.py makes random operations on one partition, and history.py
says what must be readable.

The numbers in the messages are those of docs/reference/kafka-cleaner-tests.md, where 11 and 14 to
16 are shown to be tested elsewhere. The default runs are always the same;
VARVE_INVARIANT_EXAMPLES=10000 makes that many, others each time.
"""

import pytest

from tests.support.cleaner.partition_machine import LONGER, STEPS, Partition, machine_settings
from tests.support.draws import cases

pytestmark = pytest.mark.timeout(400)  # many histories in one test

EXAMPLES = int(LONGER or cases(few=40, many=400))

Partition.TestCase.settings = machine_settings(EXAMPLES, steps=STEPS, derandomize=LONGER is None)
TestInvariants = Partition.TestCase
