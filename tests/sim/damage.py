"""Files that are gone, or rotten, when the next life of a broker begins."""

import random
from typing import Final

from cleaner.scheduler.cleaner_state_store import STATE_NAME
from storage.errors import CorruptBatchError
from storage.format import filenames
from storage.format.batch import walk_headers
from tests.sim.script import OFFSETS_GO_BACK
from tests.sim.world import HOMES, World

STATE_FILES: Final = (
    filenames.RECOVERY_POINT_CHECKPOINT,
    filenames.LOG_START_CHECKPOINT,
    filenames.REPLICATION_CHECKPOINT,
    filenames.CLEANER_CHECKPOINT,
    filenames.DAMAGE,
    STATE_NAME,
)


def lose_files(world: World, kinds: tuple[str, ...]) -> None:
    """Files beside the log's go, or rot."""
    for model in world.models.values():
        folders = [f"{home}/{model.where}" for home in HOMES]
        folder = next((path for path in folders if world.env.is_dir(path)), "")
        if not folder:
            continue
        if OFFSETS_GO_BACK in kinds:
            model.is_damaged |= _turn_offsets_back(world, folder)
            continue
        for name in world.env.listdir(folder):
            if not name.endswith(kinds) or world.env.is_dir(f"{folder}/{name}"):
                continue
            if world.rng.random() < 0.5:
                world.env.unlink(f"{folder}/{name}")
            else:
                file = world.env.open(f"{folder}/{name}", write=True)
                file.truncate(file.size() // 2)
            world.note(f"lost: {folder}/{name}")
            model.files_lost = True
    world.env.settle()


def lose_state(world: World, life: int) -> None:
    """Files of data directories go, or rot."""
    rng = random.Random(f"state {world.script.seed} {life}")
    kept = () if world.loses_points else (filenames.RECOVERY_POINT_CHECKPOINT,)
    names = [name for name in STATE_FILES if name not in kept]
    for path in (f"{home}/{name}" for home in HOMES for name in names):
        if rng.random() < 0.7 or not world.env.exists(path):
            continue
        if rng.random() < 0.5:
            world.env.unlink(path)
        else:
            file = world.env.open(path, write=True)
            file.truncate(file.size() // 2)
        world.note(f"lost: {path}")
    world.env.settle()


def _turn_offsets_back(world: World, folder: str) -> bool:
    """Damage the last batch of a closed segment in a way that its checksum does not show."""
    names = [name for name in world.env.listdir(folder) if name.endswith(".log")]
    for name in names[:-1]:
        try:
            headers = list(walk_headers(world.env.read_file(f"{folder}/{name}")))
        except CorruptBatchError:
            continue  # a loss of power left zeros where no sync had been
        if len(headers) > 1:
            (_, first), *_, (position, _) = headers
            file = world.env.open(f"{folder}/{name}", write=True)
            file.pwrite(first.base_offset.to_bytes(8, "big"), position)
            world.note(f"damaged: {folder}/{name} at {position}")
            return True
    return False
