"""What the machine of test_invariants.py has found, each as the few steps that show it."""

from storage.format.batch import ControlType, Record
from storage.format.filenames import SNAPSHOT, file_name
from tests.support.cleaner.compacted_log import Producer
from tests.support.cleaner.living_log import LivingLog
from tests.support.storage.logs import FOLDER


def value(key: bytes, value: bytes | None = b"v") -> list[Record]:
    return [Record(0, 0, key, value)]


def test_a_value_is_not_lost_with_the_later_one_that_superseded_it() -> None:
    """The later one stands in a closed segment that nothing had synced when the power went."""
    for seed in range(20):
        world = LivingLog(seed)
        world.put(value(b"a"))
        world.roll()
        world.log.flush()
        world.checkpoint()
        world.reconfigure(segment_bytes=1)  # a group each
        world.put(value(b"a", b"later"))
        world.roll()
        world.put(value(b"b"))
        world.clean()
        world.crash()
        assert [r.value for r in world.committed() if r.key == b"a"] == [b"later"]


def test_aborted_data_goes_only_once_its_marker_is_durable() -> None:
    for seed in range(20):
        world = LivingLog(seed)
        world.put(value(b"a"))
        world.put(value(b"a"), by=Producer(1))
        world.roll()
        world.log.flush()
        world.checkpoint()
        world.end_transaction(Producer(1), ControlType.ABORT)  # in the active segment
        world.clean()
        world.crash()
        assert world.log.log_end_offset == 3
        assert world.log.last_stable_offset == 3


def test_a_log_start_does_not_go_back_behind_what_was_cleaned_above_it() -> None:
    """Below it stood the value, above it the tombstone, which went as all below the start goes."""
    for seed in range(20):
        world = LivingLog(seed)
        world.put(value(b"a"))
        world.roll()
        world.put(value(b"a", None))
        world.put(value(b"b"))
        world.put(value(b"b"))
        world.roll()
        world.checkpoint()
        world.delete_records(2)
        world.clean()
        world.crash()
        assert [record.key for record in world.committed()] == [b"b"]


def test_an_emptied_marker_does_not_open_its_transaction_again() -> None:
    world = LivingLog(1)
    producer = Producer(1)
    world.put(value(b"a"), by=producer)
    world.roll()  # a snapshot that says: open
    world.end_transaction(producer, ControlType.ABORT)
    producer.epoch += 1
    world.end_transaction(producer, ControlType.ABORT)  # its last word: an empty batch in the end
    world.put(value(b"b"))
    world.roll()
    world.reconfigure(segment_bytes=1)  # a group each: the second segment's snapshot stays
    for _ in range(4):
        world.dirty = None
        world.clean()
        world.env.advance_ms(20_000)
    assert [(b.base, len(b.records)) for b in world.batches()] == [(2, 0), (3, 1)]
    world.checkpoint()
    # The snapshots after the first are written anew from it.
    world.env.unlink(f"{FOLDER}/{file_name(4, SNAPSHOT)}")
    world.crash(kill=True)
    assert world.log.last_stable_offset == 4


def test_a_producer_that_expired_is_known_again_only_as_an_older_snapshot_says() -> None:
    """All that it wrote is cleaned away; the snapshot of its time comes back with a kill."""
    world = LivingLog(1)
    producer = Producer(1, is_transactional=True)
    world.reconfigure(segment_bytes=1)  # a group each: snapshots stay
    world.end_transaction(producer, ControlType.COMMIT)
    world.put(value(b"x"))
    world.roll()
    world.log.flush()
    world.checkpoint()
    world.put(value(b"a"), by=producer)
    world.end_transaction(producer, ControlType.COMMIT)
    world.put(value(b"y"))
    world.roll()
    world.put(value(b"a"))
    world.roll()
    world.env.advance_ms(30_000)
    assert world.expire_producers(20_000) == set()
    for _ in range(4):
        world.dirty = None
        world.clean()
        world.env.advance_ms(20_000)
    assert 1 not in {batch.header.producer_id for batch in world.batches()}
    world.crash(kill=True)
    assert world.log.producers.last_records() == {1: (0, -1)}, (
        "until the next look at who has expired"
    )
    world.check_log_alone()
    assert world.expire_producers(20_000) == set()


def test_a_transaction_that_nobody_can_read_holds_nobody_up() -> None:
    """Its batch waits for retention below the start of the log; its marker was cleaned away."""
    world = LivingLog(1)
    producer = Producer(1)
    world.put(value(b"a"), by=producer)
    world.roll()
    world.end_transaction(producer, ControlType.COMMIT)
    producer.epoch += 1
    world.end_transaction(producer, ControlType.COMMIT)
    world.put(value(b"b"))
    world.roll()
    world.put(value(b"b"))
    world.roll()
    world.delete_records(1)
    world.reconfigure(segment_bytes=1)
    for _ in range(3):
        world.dirty = None
        world.clean()
        world.env.advance_ms(20_000)
    assert 1 not in [batch.base for batch in world.batches()], "its marker has gone"
    world.check_log_alone()
    assert world.reopened().last_stable_offset == world.log.log_end_offset
