"""Remove the files of a job that were not published: of the workers, and of remote compactions."""

import asyncio

import structlog

from cleaner.job import CleanJob
from storage.env import Env
from storage.swap.swap_journal import discard_outputs

logger = structlog.get_logger("cleaner")


async def remove_unpublished(env: Env, job: CleanJob) -> None:
    """Remove the unpublished files of a job from the partition's folder.

    Call it only if no journal names them. After an error the next start removes them; until then
    they only take space.
    """
    where = {"partition": str(job.partition), "job_id": job.job_id}
    try:
        removed = await asyncio.to_thread(discard_outputs, env, job.directory, job.job_id)
    except OSError as error:
        logger.warning("unpublished files not removed", **where, reason=str(error))
        return
    if removed:
        logger.debug("unpublished files removed", **where, files=len(removed))
