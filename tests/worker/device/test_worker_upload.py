"""Tables of a step: values, types and alignment, whatever blocks they land in."""

from __future__ import annotations

import numpy as np
import torch

from worker_service.device.upload import Upload

CPU = torch.device("cpu")


def test_a_cpu_has_its_tables_at_once() -> None:
    upload = Upload(CPU)
    table = upload.table([3, 1, 2])
    assert table.dtype == torch.int64
    assert table.tolist() == [3, 1, 2]
    assert upload.table([], np.float32).shape == (0,)
    upload.send()


def test_tables_hold_their_values_once_they_were_sent() -> None:
    """The way of a GPU, with memory of the host in place of the device's."""
    upload = Upload(CPU, block_bytes=256, pin_memory=False)
    rng = np.random.default_rng(0)
    for _ in range(3):
        wanted = [
            (rng.random(shape) * 100).astype(dtype)
            for shape in ((5,), (1, 7), (100,), (0,), (3, 1, 4))
            for dtype in (np.int64, np.int32, np.float32, np.float64)
        ]
        tables = [upload.place(np.ascontiguousarray(array)) for array in wanted]
        upload.send()
        for array, table in zip(wanted, tables, strict=True):
            assert table.data_ptr() % 8 == 0
            assert table.dtype == torch.from_numpy(np.zeros(1, array.dtype)).dtype
            assert torch.equal(table, torch.from_numpy(array.copy()).view(table.shape))
