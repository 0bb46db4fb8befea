"""`python -m kvstore_service`: one store process, from arguments to a clean stop."""

from __future__ import annotations

from splitpoint.extras import need_for_program

need_for_program("store")  # before the imports that it is about

import argparse
import asyncio
import logging
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_service.eviction.cache_admission import SecondUseFilter
from kvstore_service.eviction.policies import POLICIES
from kvstore_service.eviction.watermarks import WatermarkEvictor, Watermarks
from kvstore_service.integrity.scrubber import Scrubbing
from kvstore_service.metrics import readings
from kvstore_service.opening import TierSettings, tier_settings, tiers_of
from kvstore_service.server import KvStoreServicer
from kvstore_service.serving import LEAST_SLOT_BYTES, FirstAttach, StoreServer
from kvstore_service.stats import StoreInfo
from kvstore_service.store import KvStore
from kvstore_service.tiers.disk.format import Division
from splitpoint.arena.files import ArenaLost, check_room
from splitpoint.arena.format import (
    ArenaFormatError,
    ForeignByteOrder,
    Geometry,
    UnsupportedVersion,
)
from splitpoint.arena.mapping import superblock_at
from splitpoint.arena.owner import ADVICE, ArenaDiffers, OpenedArena, open_or_create_arena
from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.config import format_size, parse_rate, parse_size
from splitpoint.discovery.redis_announcer import Announcer, announced
from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.host.huge_pages import Backing
from splitpoint.host.numa import bound_to, choose_node
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.observe.metrics_server import metrics_served
from splitpoint.options import store as options
from splitpoint.options.cpu_kernels import AUTO
from splitpoint.options.values import parse_options
from splitpoint.service import OnReady, Setup, announce_ready, run_service, set_up
from splitpoint.shapes import PAGE_ALIGNMENT, ArenaLayout, DataType, Encoding, WeightFormat
from splitpoint.transport.tls import Identity

if TYPE_CHECKING:
    from splitpoint.discovery.redis_link import RedisLink

log = logging.getLogger(__name__)

# Seconds between two checks that the arena's file exists and is complete.
ARENA_LOOK_SECONDS = 1.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parse_options("kvstore_service", __doc__, options.SECTIONS, arguments)


def watermarks_of(arguments: argparse.Namespace) -> Watermarks | None:
    """Return None if eviction in the background is off. Raises InvalidArgument."""
    above, to = arguments.evict_above, arguments.evict_to
    if above is None:
        if to is not None:
            raise InvalidArgument("--evict-to needs --evict-above", field="evict-to")
        return None
    return Watermarks(above, max(0.0, above - options.WATERMARK_GAP) if to is None else to)


def scrubbing_of(arguments: argparse.Namespace) -> Scrubbing | None:
    """Return None if scrubbing is off. Raises InvalidArgument."""
    seconds = arguments.scrub_seconds
    least = options.LEAST_SCRUB_SECONDS
    if 0 < seconds < least:
        raise InvalidArgument(f"--scrub-seconds is 0 or at least {least:g}", field="scrub-seconds")
    rate = parse_rate(arguments.scrub_rate, field="scrub-rate")
    return Scrubbing(seconds, rate) if seconds else None


def wanted_layout(arguments: argparse.Namespace) -> ArenaLayout | None:
    """Return the layout of the arena. None: of pages, and the first Attach says of which size.

    Raises InvalidArgument, and ArenaDiffers if `--page-size auto` finds an arena of another kind.
    """
    given = (arguments.layout, arguments.model, arguments.page_size)
    if sum(each is not None for each in given) != 1:
        raise InvalidArgument(
            "give one of --model DIR, --layout JSON and --page-size auto|SIZE", field="model"
        )
    if arguments.page_size is not None:
        _check_page_options(arguments)
    return kept_pages(arguments) if arguments.page_size == AUTO else layout_of(arguments)


def _check_page_options(arguments: argparse.Namespace) -> None:
    """Raise InvalidArgument for options that have no meaning for pages."""
    for option, needless in ((options.ADMISSION, "second-use"), (options.TRANSFER, options.ENGINE)):
        if getattr(arguments, option.name) == needless:
            raise InvalidArgument(
                f"{option.flag} {needless} is for chunks of tokens, not for --page-size",
                field=option.name,
            )


def kept_pages(arguments: argparse.Namespace) -> ArenaLayout | None:
    """Return the layout of an arena of pages that an earlier store left. None if there is none.

    None also if it may be replaced: the first engine's pages decide whether it is.
    Raises ArenaDiffers if an arena of another kind or version is there and may not be replaced.
    """
    path = arguments.arena.absolute()
    try:
        layout = superblock_at(path).layout
    except (UnsupportedVersion, ForeignByteOrder) as error:
        found = error.message
    except (NotFound, ArenaFormatError):
        return None  # `ArenaOwner.adopt` sets a damaged one aside
    else:
        if layout.page_bytes and not arguments.replace_arena:
            return layout
        found = "an arena of chunks of tokens"
    if not arguments.replace_arena:
        raise ArenaDiffers(f"{path}: {found}; {ADVICE}", path=path)
    return None


def layout_of(arguments: argparse.Namespace) -> ArenaLayout:
    """Return the layout given by --layout, --model or --page-size. Raises InvalidArgument."""
    if arguments.page_size is not None:
        layout = ArenaLayout.of_pages(parse_size(arguments.page_size, field="page-size"))
        if layout.page_bytes < PAGE_ALIGNMENT:  # millions of slots
            raise InvalidArgument("--page-size: a slot has at least 4KiB", field="page-size")
        return layout
    if arguments.layout is not None:
        try:
            return ArenaLayout.from_json(arguments.layout)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(f"--layout is no layout: {error}", field="layout") from error
    shape = read_shape(
        arguments.model,
        data_type=None if arguments.dtype == "auto" else DataType(arguments.dtype),
    )
    wanted = {"auto": shape.activations_can_pay, "always": True, "never": False}
    return ArenaLayout.of(
        shape,
        chunk_tokens=arguments.chunk_tokens,
        has_activations=wanted[arguments.activations],
        model_fingerprint=model_fingerprint(arguments.model, WeightFormat(arguments.weights)),
        encoding=Encoding(arguments.kv_encoding),
    )


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What the arguments mean, checked before anything is created."""

    layout: ArenaLayout | None  # None: see `wanted_layout`
    arena_bytes: int
    watermarks: Watermarks | None
    scrubbing: Scrubbing | None
    tiers: TierSettings

    def geometry_of(self, layout: ArenaLayout) -> Geometry:
        """Raises InvalidArgument if the arena or the disk tier is too small for a layout."""
        if self.tiers.disk is not None:
            Division.of(layout, self.tiers.disk_bytes)
        return Geometry.fitting(layout, self.arena_bytes)


def check_arguments(arguments: argparse.Namespace) -> StoreSettings:
    """Check the arguments before anything is created.

    Raises InvalidArgument, ArenaDiffers, and ResourceExhausted for an arena that cannot fit.
    """
    watermarks, scrubbing = watermarks_of(arguments), scrubbing_of(arguments)
    tiers = tier_settings(arguments)
    choose_node(arguments.numa_node)
    size = parse_size(arguments.host_memory, field="host-memory")
    settings = StoreSettings(wanted_layout(arguments), size, watermarks, scrubbing, tiers)
    if settings.layout is not None:
        settings.geometry_of(settings.layout)  # before minutes of allocating an arena
    else:  # before the first engine attaches
        settings.geometry_of(ArenaLayout.of_pages(LEAST_SLOT_BYTES))
        parents = arguments.arena.absolute().parents
        check_room(next(parent for parent in parents if parent.is_dir()), size)
    return settings


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal or the parent's end."""
    await run(arguments, set_up(arguments), announce_ready)


async def run(arguments: argparse.Namespace, setup: Setup, on_ready: OnReady) -> None:
    """Create the arena, serve until `setup.stop` is set, and clean up."""
    settings = check_arguments(arguments)
    meters = Meters(Service.KVSTORE)
    # First, so that a port in use is reported before many GiB are allocated.
    async with metrics_served(arguments, meters), AsyncExitStack() as stack:
        server = StoreServer(arguments, setup, meters, on_ready)
        stack.push_async_callback(server.stop)
        layout = settings.layout
        if layout is None:
            first = FirstAttach(settings.geometry_of)
            await server.serve(first)
            layout = await first.layout(setup.stop)
            if layout is None:
                return
        geometry = settings.geometry_of(layout)
        opened, servicer = await _open_store(arguments, settings, geometry, setup.identity)
        superblock = opened.arena.superblock
        is_lost = False
        try:
            await servicer.tiers.start()
            if servicer.transfer is not None:
                await servicer.transfer.start()
            with meters.reading(lambda: readings(servicer)):
                await _serve_store(server, servicer, opened, arguments, setup)
        except ArenaLost as error:
            # Closing would touch the mapping, and another file may be at the path by now.
            is_lost = True
            opened.owner.abandon(error.loss)
            raise
        finally:
            await servicer.tiers.close()
            if servicer.transfer is not None:
                await servicer.transfer.close()
            if not is_lost:
                servicer.store.close()
                if arguments.keep_arena:
                    opened.owner.keep(superblock)
                else:
                    opened.owner.remove()


async def _open_store(
    arguments: argparse.Namespace,
    settings: StoreSettings,
    geometry: Geometry,
    identity: Identity,
) -> tuple[OpenedArena, KvStoreServicer]:
    """Create or adopt the arena, and open the store on it."""
    node = choose_node(arguments.numa_node)
    backing = Backing(arguments.huge_pages, arguments.arena.absolute().parent)

    def open_arena() -> OpenedArena:
        with bound_to(node):
            return open_or_create_arena(
                arguments.arena.absolute(),
                geometry.layout,
                geometry.slot_count,
                replace_other=arguments.replace_arena,
                backing=backing,
            )

    # In a thread: allocating many GiB takes seconds, and a signal must not be lost.
    opened = await asyncio.to_thread(open_arena)
    memory = backing.description
    if node is not None and not opened.is_adopted:
        memory += f" on NUMA node {node}"
    arena = opened.arena
    log.info(
        "%s arena %s: %s, %d slots of %s",
        "adopted" if opened.is_adopted else "new",
        arena.path,
        format_size(arena.size_bytes),
        arena.slot_count,
        _words_of(arena.layout),
    )
    store = KvStore(
        arena,
        clock=time.monotonic,
        lease_seconds=arguments.lease_seconds,
        policy=POLICIES[arguments.eviction](),
        admission=(
            SecondUseFilter.for_slots(arena.slot_count)
            if arguments.admission == "second-use"
            else None
        ),
    )
    if opened.is_adopted:
        _report_recovery(store)
    info = StoreInfo(
        policy_name=arguments.eviction,
        memory_description=memory,
        page_reason=arguments.page_reason,
        former_loss=opened.former_loss,
        evictor=(
            None
            if settings.watermarks is None
            else WatermarkEvictor(store.pool, settings.watermarks)
        ),
    )
    if opened.former_loss is not None:
        log.info("the arena before this one was %s: the cache begins anew", opened.former_loss)
    log.info("memory: %s", memory)
    tiers, transfer = tiers_of(settings.tiers, store.pool, identity)
    return opened, KvStoreServicer(
        store, info=info, scrubbing=settings.scrubbing, tiers=tiers, transfer=transfer
    )


def _words_of(layout: ArenaLayout) -> str:
    """Return what a slot holds, in words."""
    if layout.page_bytes:
        return f"a page of {format_size(layout.page_bytes)}"
    activations = "with" if layout.has_activations else "without"
    return f"{layout.chunk_tokens} tokens, {layout.encoding.value}, {activations} activations"


def _report_recovery(store: KvStore) -> None:
    recovered = store.recovered_state
    for damage in recovered.damages:
        log.error("slot %d is not served: %s", damage.slot, damage.error.message)
    log.info(
        "epoch %d: %d chunks found, %d records refused, %d chunks unreachable, "
        "%d slots held by earlier sessions, read in %.3f s",
        store.epoch,
        len(recovered.chunks),
        len(recovered.damages),
        recovered.unreachable_count,
        recovered.unsealed_count,
        store.recovery_seconds,
    )


async def _serve_store(
    server: StoreServer,
    servicer: KvStoreServicer,
    opened: OpenedArena,
    arguments: argparse.Namespace,
    setup: Setup,
) -> None:
    await server.serve(servicer)
    maintenance = {
        asyncio.create_task(servicer.maintenance.run()),
        asyncio.create_task(_watch_arena(opened)),
    }
    if servicer.tiers.tiers:
        maintenance.add(asyncio.create_task(servicer.tiers.run()))
    if servicer.info.evictor is not None:
        maintenance.add(asyncio.create_task(servicer.info.evictor.run()))
    stopping = asyncio.create_task(setup.stop.wait())

    redis = setup.redis
    if redis is not None and opened.arena.layout.page_bytes:
        redis = None
        log.info("not announced in Redis: schedulers cannot derive the keys of pages")

    def publisher(link: RedisLink) -> Announcer:
        from kvstore_service.catalog import CatalogPublisher

        address = arguments.advertise or server.address
        return CatalogPublisher(link, servicer.store.pool, address, servicer.tiers)

    try:
        async with announced(redis, publisher, name="catalog") as servicer.info.redis:
            await asyncio.wait({*maintenance, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in maintenance:
            if task.done():
                task.result()  # raises: a store must not run without maintenance
    finally:
        await server.stop()
        await servicer.close()
        stopping.cancel()
        for task in maintenance:
            task.cancel()
        await asyncio.wait({stopping, *maintenance})  # until their I/O in the arena has ended
        if not any(isinstance(_error_of(task), ArenaLost) for task in maintenance):
            await servicer.tiers.flush(is_arena_kept=arguments.keep_arena)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


async def _watch_arena(opened: OpenedArena) -> None:
    """Raise ArenaLost when the arena's file is missing or incomplete."""
    while True:
        await asyncio.sleep(ARENA_LOOK_SECONDS)
        opened.owner.check_there(opened.arena)


def main() -> int:
    arguments = parse_arguments()
    return run_service("kvstore", serve, arguments, options.SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
