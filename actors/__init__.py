"""Actors with durable state, and agents with a memory.

Subclass :class:`Actor` or :class:`Agent`, handle messages with :func:`on`, and let a :class:`Host` (or
``offbook.runtime.Runtime``, which makes one) run them.
"""

from offbook.bus.errors import (
    ActorFailed,
    ActorStopped,
    BadMessage,
    Cancelled,
    ConnectionLost,
    ContextTooLarge,
    CycleError,
    DeadlineExceeded,
    EngineBusy,
    EngineFailed,
    InvalidAddress,
    InvalidRequest,
    MailboxFull,
    MessageTooLarge,
    ModelError,
    NoSuchActor,
    OffbookError,
    StateNotLoadable,
    StateNotStorable,
    TooManyTopics,
    UnknownMessageType,
)

from .actor import Actor, every, on
from .agent import Agent
from .clock import Clock, VirtualClock, WallClock
from .host import Host
from .journal import Journal, JournalFailed, JournalInUse
from .lm import ChatMessage, StateHandle, Usage
from .memory import FullContext
from .message import Message, Request
from .running import RunReport
from .speech import Reply, Speech
from .supervision import Failure, Supervision
from .topicstore import JournalTopicStore

__all__ = [
    "Actor",
    "ActorFailed",
    "ActorStopped",
    "Agent",
    "BadMessage",
    "Cancelled",
    "ChatMessage",
    "Clock",
    "ConnectionLost",
    "ContextTooLarge",
    "CycleError",
    "DeadlineExceeded",
    "EngineBusy",
    "EngineFailed",
    "Failure",
    "FullContext",
    "Host",
    "InvalidAddress",
    "InvalidRequest",
    "Journal",
    "JournalFailed",
    "JournalInUse",
    "JournalTopicStore",
    "MailboxFull",
    "Message",
    "MessageTooLarge",
    "ModelError",
    "NoSuchActor",
    "OffbookError",
    "Reply",
    "Request",
    "RunReport",
    "Speech",
    "StateHandle",
    "StateNotLoadable",
    "StateNotStorable",
    "Supervision",
    "TooManyTopics",
    "UnknownMessageType",
    "Usage",
    "VirtualClock",
    "WallClock",
    "every",
    "on",
]
