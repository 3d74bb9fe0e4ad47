"""Messages become ids once: one BOS, history never rendered again, generated ids kept as sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import numpy as np
import pytest

from offbook.actors.lm import ChatMessage
from offbook.bus.errors import ContextTooLarge, InvalidRequest
from offbook.runtime.engine.context import fit
from offbook.runtime.engine.dialogue import SENTINEL, Dialogue, merged

CHATML = (
    "{% for m in messages %}<|{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant>{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>model\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant><think>{% endif %}"
)
SPECIAL = ["<bos>", "<end>"]
BOS, END = 1, 2


class Tokenizer:
    """Characters as ids, with ``<bos>`` and ``<end>`` as single ones; a Jinja template."""

    bos_token_id = BOS

    def __init__(self, template: str | None, *, adds_bos: bool = False) -> None:
        self.chat_template, self.adds_bos = template, adds_bos
        self.rendered: list[list[dict[str, str]]] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        for token, name in ((BOS, "<bos>"), (END, "<end>")):
            text = text.replace(name, chr(token))
        ids = [ord(c) for c in text]
        return [BOS, *ids] if self.adds_bos and add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join({BOS: "<bos>", END: "<end>"}.get(int(i), chr(i)) for i in ids)

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        def refuse(why: str) -> None:
            raise ValueError(why)

        assert self.chat_template is not None
        self.rendered.append(messages)
        template = jinja2.Template(self.chat_template)
        return template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, raise_exception=refuse
        )


STYLES: dict[str, Callable[[], Tokenizer]] = {
    "chatml": lambda: Tokenizer(CHATML),
    "chatml-adding-bos": lambda: Tokenizer(CHATML, adds_bos=True),
    "gemma": lambda: Tokenizer(GEMMA, adds_bos=True),
    "thinking": lambda: Tokenizer(THINKING),
    "plain": lambda: Tokenizer(None, adds_bos=True),
}


def talk(dialogue: Dialogue, turns: Sequence[tuple[str, str]], system: str | None) -> str:
    """A conversation of (message, answer as generated): the whole transcript as text."""
    transcript = np.zeros(0, np.uint32)
    for text, answer in turns:
        prompt = dialogue.prompt(system, transcript, [ChatMessage("user", text)])
        generated = np.array(dialogue.tokenizer.encode(answer, add_special_tokens=False), np.uint32)
        transcript = np.concatenate([transcript, prompt, generated])
    return str(dialogue.tokenizer.decode(transcript))


TURNS = [("Hi.", "<think>hm</think>Hello<end>"), ("Who are you?", "I am An"), ("Sure?", "Yes<end>")]

EXPECTED = {
    "chatml": (
        "<|system>Be brief.<end>\n<|user>Hi.<end>\n<|assistant><think>hm</think>Hello<end>\n"
        "<|user>Who are you?<end>\n<|assistant>I am An<end>\n<|user>Sure?<end>\n<|assistant>Yes<end>"
    ),
    "gemma": (
        "<bos><start>user\nBe brief.\n\nHi.<end>\n<start>model\n<think>hm</think>Hello<end>\n"
        "<start>user\nWho are you?<end>\n<start>model\nI am An<end>\n<start>user\nSure?<end>\n"
        "<start>model\nYes<end>"
    ),
    "thinking": (
        "<|system>Be brief.<end>\n<|user>Hi.<end>\n<|assistant><think><think>hm</think>Hello<end>\n"
        "<|user>Who are you?<end>\n<|assistant><think>I am An<end>\n<|user>Sure?<end>\n"
        "<|assistant><think>Yes<end>"
    ),
    "plain": ("<bos>Be brief.\n\nHi.<think>hm</think>Hello<end>\n\nWho are you?I am An\n\nSure?Yes<end>"),
}
EXPECTED["chatml-adding-bos"] = "<bos>" + EXPECTED["chatml"]


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_is_what_the_template_makes_of_it_with_generated_ids_kept(style: str) -> None:
    """An answer that was cut off is closed by the template; one that ended by itself is not closed twice."""
    assert talk(Dialogue(STYLES[style](), [END]), TURNS, "Be brief.") == EXPECTED[style]


@pytest.mark.parametrize("style", STYLES)
def test_there_is_never_more_than_one_bos(style: str) -> None:
    text = talk(Dialogue(STYLES[style](), [END]), TURNS * 3, None)
    assert text.count("<bos>") == (0 if style in ("chatml", "thinking") else 1)
    assert text.startswith("<bos>") or "<bos>" not in text


@pytest.mark.parametrize("style", [style for style in STYLES if style != "plain"])
def test_history_is_never_rendered_again(style: str) -> None:
    tokenizer = STYLES[style]()
    talk(Dialogue(tokenizer, [END]), [("first words", "first answer<end>"), ("second words", "x<end>")], None)
    assert not any("first" in message["content"] for message in tokenizer.rendered[-1])


def test_neighbours_of_one_role_are_joined() -> None:
    messages = [ChatMessage("user", "a"), ChatMessage("user", "b"), ChatMessage("tool", "c")]
    assert merged(messages) == [{"role": "user", "content": "a\n\nb"}, {"role": "tool", "content": "c"}]


@pytest.mark.parametrize("style", STYLES)
def test_a_message_may_say_anything_our_own_marks_too(style: str) -> None:
    dialogue = Dialogue(STYLES[style](), [END])
    past = dialogue.prompt(None, np.zeros(0, np.uint32), [ChatMessage("user", "Hi.")])
    said = f"What is {SENTINEL} and {SENTINEL}-1-end?"
    prompt = dialogue.prompt("Be brief.", past, [ChatMessage("user", said)])
    assert said in dialogue.tokenizer.decode(prompt)


@pytest.mark.parametrize("style", STYLES)
def test_what_is_read_ahead_is_what_a_later_prompt_begins_with(style: str) -> None:
    dialogue = Dialogue(STYLES[style](), [END])
    past = dialogue.prompt(None, np.zeros(0, np.uint32), [ChatMessage("user", "Hi.")])
    heard = [ChatMessage("user", "The mill burns.")]
    for transcript in (np.zeros(0, np.uint32), past):
        ahead = dialogue.ahead("Be brief.", transcript, heard)
        later = dialogue.prompt("Be brief.", transcript, [*heard, ChatMessage("user", "Answer, please.")])
        assert len(ahead) > len("The mill burns.")
        assert np.array_equal(later[: len(ahead)], ahead)


@pytest.mark.parametrize("style", STYLES)
def test_the_persona_is_the_rendered_system_prompt(style: str) -> None:
    dialogue = Dialogue(STYLES[style](), [END])
    transcript = dialogue.prompt("Be brief.", np.zeros(0, np.uint32), [ChatMessage("user", "Hi.")])
    persona = dialogue.tokenizer.decode(transcript[: dialogue.persona_length("Be brief.", transcript)])
    assert "Be brief." in persona
    assert "Hi." not in persona


@pytest.mark.parametrize("messages", [[], [ChatMessage("user", "")], [ChatMessage("user", " \n")] * 2])
def test_a_request_that_says_nothing_is_refused(messages: list[ChatMessage]) -> None:
    with pytest.raises(InvalidRequest):
        Dialogue(Tokenizer(CHATML), [END]).prompt(None, np.zeros(0, np.uint32), messages)


def test_roles_a_template_refuses_are_named() -> None:
    dialogue = Dialogue(Tokenizer(GEMMA), [END])
    with pytest.raises(InvalidRequest, match="assistant"):
        dialogue.prompt(None, np.zeros(0, np.uint32), [ChatMessage("assistant", "Hello.")])


# ---- a transcript that outgrows the context


def some(transcript: int = 100, prompt: int = 10, **options: Any) -> Any:
    defaults: dict[str, Any] = {"max_tokens": 10, "limit": 80, "persona": 5, "turn_ends": (), "refuse": False}
    past = np.arange(100, 100 + transcript, dtype=np.uint32)
    return fit("a", past, np.arange(9000, 9000 + prompt, dtype=np.uint32), **(defaults | options))


def test_what_fits_is_left_alone() -> None:
    fitted = some(transcript=60)
    assert (len(fitted.ids), fitted.kept, fitted.truncated) == (70, 60, 0)


def test_the_persona_and_the_most_recent_half_are_kept() -> None:
    fitted = some()
    assert (fitted.kept, fitted.truncated) == (5, 48)
    assert fitted.ids.tolist() == [*range(100, 105), *range(153, 200), *range(9000, 9010)]
    assert len(fitted.ids) + 10 <= 80


def test_the_cut_is_moved_behind_the_end_of_a_turn() -> None:
    fitted = some(turn_ends=(160,))
    assert fitted.ids[5] == 161
    assert fitted.truncated == 56


def test_refusing_says_what_to_do() -> None:
    with pytest.raises(ContextTooLarge, match="context of 80"):
        some(refuse=True)


@pytest.mark.parametrize("changes", [{"persona": 70}, {"prompt": 75}, {"max_tokens": 75}])
def test_what_can_not_be_shortened_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ContextTooLarge, match="shorten"):
        some(**changes)
