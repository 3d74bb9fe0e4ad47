"""KV memory on disk: checksummed block files, agents' tails, and the index over them. No MLX in here."""

from .audit import Fault, VerifyReport
from .blocks import Destinations
from .hashing import block_hash, chain, chain_at, root_hash
from .inventory import AgentRecord, StoreStats
from .layout import BLOCK_TOKENS, Array, Tail, TailInfo, TensorSpec
from .results import (
    Busy,
    Corrupt,
    Failed,
    Full,
    Loaded,
    LoadResult,
    Missing,
    PutResult,
    ReadOnly,
    Removed,
    RemoveResult,
    Stored,
    StoreLocked,
    StoreUsageError,
    TailLoaded,
    TailResult,
)
from .store import BlockStore
from .transfer import Exported, ExportResult, Imported, ImportResult

__all__ = [
    "BLOCK_TOKENS",
    "AgentRecord",
    "Array",
    "BlockStore",
    "Busy",
    "Corrupt",
    "Destinations",
    "ExportResult",
    "Exported",
    "Failed",
    "Fault",
    "Full",
    "ImportResult",
    "Imported",
    "LoadResult",
    "Loaded",
    "Missing",
    "PutResult",
    "ReadOnly",
    "RemoveResult",
    "Removed",
    "StoreLocked",
    "StoreStats",
    "StoreUsageError",
    "Stored",
    "Tail",
    "TailInfo",
    "TailLoaded",
    "TailResult",
    "TensorSpec",
    "VerifyReport",
    "block_hash",
    "chain",
    "chain_at",
    "root_hash",
]
