"""From messages to token ids, without ever rendering history again.

A new message becomes tokens by rendering the chat template over [system, user, assistant with a
sentinel text, new messages] and taking what follows the sentinel, encoded without special tokens. So
the transcript holds one BOS, generated ids are kept as sampled, and templates that rewrite old turns
(strip thinking, say) change nothing.

What people write is text: where a message or persona contains the spelling of a control token
(``<|im_end|>``), it is encoded as those characters, so nobody ends a turn or opens another by writing so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from offbook.actors.lm import ChatMessage
from offbook.bus.errors import InvalidRequest

from ..kv.table import Ids, common_prefix

SENTINEL = "offbook-sentinel-7f3a"

SHIELD = "offbook-shield-7f3a-{}-end"
"""Stands in rendered text for the spelling of control token number {} in what people wrote."""

_SHIELDED = re.compile(SHIELD.format(r"(\d+)"))

_CONTROL = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
"""What control tokens look like, for tokenizers that do not mark theirs as special."""


def control_tokens(tokenizer: Any) -> list[str]:
    """Spellings that the tokenizer turns into control tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    texts = {str(t): bool(getattr(t, "special", False)) for t in added.values()}
    chosen = [text for text, special in texts.items() if text and (special or _CONTROL.fullmatch(text))]
    return sorted(chosen, key=len, reverse=True)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Ids that are never text, with their spellings: begins and ends of turns and the like.

    Not all control tokens are: tags such as ``<think>`` are the model's own words.
    """
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {int(id): str(token) for id, token in added.items() if getattr(token, "special", False)}


def sentinel_for(*texts: str) -> str:
    """A sentinel that none of the texts contains: people may write ours."""
    sentinel, number = SENTINEL, 0
    while any(sentinel in text for text in texts):
        number += 1
        sentinel = f"{SENTINEL}-{number}-end"
    return sentinel


def merged(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Neighbours of one role joined: many templates insist that roles alternate."""
    out: list[dict[str, str]] = []
    for message in messages:
        if out and out[-1]["role"] == message.role:
            out[-1]["content"] += "\n\n" + message.content
        else:
            out.append({"role": message.role, "content": message.content})
    return out


class Dialogue:
    """Renders messages for one model.

    Args:
        tokenizer: a Hugging Face tokenizer (or mlx-lm's wrapper of one).
        eos: ids that end a turn.
    """

    def __init__(self, tokenizer: Any, eos: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(eos)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.bos: int | None = getattr(tokenizer, "bos_token_id", None)
        self.controls = control_tokens(tokenizer)
        self.special = special_tokens(tokenizer)
        self._written = re.compile("|".join(map(re.escape, self.controls))) if self.controls else None

    def prompt(self, system: str | None, transcript: Ids, messages: Sequence[ChatMessage]) -> Ids:
        """The ids to append to ``transcript`` so that the model answers ``messages``.

        Raises:
            InvalidRequest: no message, or nothing but white space in all of them.
        """
        check(messages)
        system = self._shield(system) if system else None
        messages = [ChatMessage(m.role, self._shield(m.content)) for m in messages]
        if not self.has_template:
            return self._plain(system, transcript, messages)
        new = merged(messages)
        if not len(transcript):
            return self._first(self._render(self._with_system(system, new)))
        sentinel = sentinel_for(system or "", *(message["content"] for message in new))
        text = self._render([*self._past(system, sentinel), *new])
        return self._continued(text.rpartition(sentinel)[2], transcript)

    def ahead(self, system: str | None, transcript: Ids, messages: Sequence[ChatMessage]) -> Ids:
        """The ids that any later prompt beginning with ``messages`` is sure to start with.

        What a following message changes (the last characters may merge into other tokens, the end of
        the turn) is cut off: the common prefix of two different continuations.
        """
        variants = [
            self.prompt(system, transcript, [*messages, ChatMessage("user", more)])
            for more in ("A different text.", "1 + 1?")
        ]
        return variants[0][: common_prefix(*variants)]

    def openings(self) -> tuple[Ids, Ids]:
        """What a user's next message begins with, before a word of it: ids that follow a transcript.

        (All but surely: white space at a message's beginning may become one token with what is before it.)

        Returns:
            Two: behind a turn that was cut off, and behind one that ended by itself.
        """
        cut_off = next(id for id in range(len(self.eos) + 1) if id not in self.eos)
        behind = []
        for last in (cut_off, min(self.eos, default=cut_off)):
            transcript = np.array([last], np.uint32)
            one, other = (self.ahead(system, transcript, ()) for system in (None, "A persona."))
            behind.append(one[: common_prefix(one, other)])
        return behind[0], behind[1]

    def persona_length(self, system: str | None, transcript: Ids) -> int:
        """How many leading ids of ``transcript`` are the rendered system prompt."""
        system = self._shield(system) if system else None
        if not self.has_template:
            head = self._first((system + "\n\n") if system else "")
            return common_prefix(head, transcript)
        sentinel = sentinel_for(system or "")
        text = self._render(self._with_system(system, [{"role": "user", "content": sentinel}]))
        return common_prefix(self._first(text.partition(sentinel)[0]), transcript)

    def _with_system(self, system: str | None, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, *messages] if system else messages

    def _past(self, system: str | None, sentinel: str) -> list[dict[str, str]]:
        past = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": sentinel}]
        return self._with_system(system, past)

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:
            if messages and messages[0]["role"] == "system":
                # Templates without a system role: the persona opens the first user message instead.
                first, second, *rest = messages
                if second["role"] == "user":
                    joined = {"role": "user", "content": first["content"] + "\n\n" + second["content"]}
                    return self._render([joined, *rest])
            roles = [message["role"] for message in messages]
            raise InvalidRequest(f"the model's chat template refuses roles {roles}: {error}") from error

    def _first(self, text: str) -> Ids:
        ids = self._encode(text)
        adds_bos = self.bos is not None and self._adds_bos()
        if adds_bos and (not len(ids) or ids[0] != self.bos):
            ids = np.concatenate([np.array([self.bos], np.uint32), ids])
        return ids

    def _adds_bos(self) -> bool:
        plain = self.tokenizer.encode("a")
        return len(plain) > 0 and plain[0] == self.bos

    def _continued(self, text: str, transcript: Ids) -> Ids:
        ids = self._encode(text)
        # The template closes the assistant's turn; a turn that ended by itself is closed already.
        if len(ids) and int(transcript[-1]) in self.eos and int(ids[0]) in self.eos:
            ids = ids[1:]
        return ids

    def _plain(self, system: str | None, transcript: Ids, messages: Sequence[ChatMessage]) -> Ids:
        """Base models without a template: the text itself, a blank line between messages."""
        parts = [message.content for message in messages]
        if not len(transcript):
            return self._first("\n\n".join([system, *parts] if system else parts))
        return self._encode("\n\n" + "\n\n".join(parts))

    def _shield(self, text: str) -> str:
        """Put a mark in place of every control token's spelling."""
        if self._written is None:
            return text
        return self._written.sub(lambda found: SHIELD.format(self.controls.index(found[0])), text)

    def _encode(self, text: str) -> Ids:
        """The ids of rendered text; marks become the characters they stand for."""
        ids: list[int] = []
        for at, part in enumerate(_SHIELDED.split(text)):
            if at % 2 == 0:
                ids += self._raw(part)
            elif int(part) < len(self.controls):
                # In two pieces it is no control token's spelling any more.
                spelling = self.controls[int(part)]
                ids += self._raw(spelling[:1]) + self._raw(spelling[1:])
        return np.array(ids, np.uint32)

    def _raw(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


def check(messages: Sequence[ChatMessage]) -> None:
    """Refuse a request that says nothing."""
    if not messages:
        raise InvalidRequest("no messages: give at least one message to answer")
    if not any(message.content.strip() for message in messages):
        raise InvalidRequest("empty prompt: the messages hold nothing but white space")
