"""Texts of several turns (prompts and answers), of which only the answers are learned."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizer import Tokenizer

# Roles whose turns a model learns to write.
LEARNED = ("assistant", "completion")


class Turn(NamedTuple):
    """What somebody says: ``system``, ``user``, ``assistant``, or ``prompt``, ``completion``."""

    role: str
    text: str


# Turns in order.
Conversation = tuple[Turn, ...]
# Text, and whether it is to be learned.
Piece = tuple[str, bool]


def turns_in(columns: dict[str, Any]) -> Conversation:
    """The turns of a row: of its ``messages``, or of its ``prompt`` and ``completion``.

    Raises:
        ValueError: They are malformed; it says how.
    """
    if "messages" in columns:
        turns = tuple(_turn(message) for message in _list(columns["messages"]))
    else:
        turns = (
            Turn("prompt", _text("prompt", columns["prompt"])),
            Turn("completion", _text("completion", columns["completion"])),
        )
    if not any(turn.role in LEARNED and turn.text.strip() for turn in turns):
        raise ValueError("there is no answer to learn from (role 'assistant', or 'completion')")
    return turns


def _list(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' is not a list of objects with 'role' and 'content'")
    return messages


def _turn(message: Any) -> Turn:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message is not an object with 'role' and 'content'")
    return Turn(message["role"], _text("content", message.get("content")))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the {name} is {value!r}, not a text")
    return value


def as_text(turns: Conversation) -> str:
    """The turns as one text, without marks."""
    return "\n".join(turn.text for turn in turns)


def prompt_of(turns: Conversation) -> Conversation:
    """What comes before the last answer."""
    last = max(i for i, turn in enumerate(turns) if turn.role in LEARNED)
    return turns[:last]


def encode_turns(
    tokenizer: Tokenizer, turns: Conversation, *, answer_next: bool = False
) -> tuple[list[int], list[bool]]:
    """Token numbers, and which of them are learned.

    Each piece is tokenised by itself, so that no token is part of a prompt and of an answer.

    Args:
        tokenizer: With its chat template, if it has one and the turns are messages.
        turns: In order.
        answer_next: An answer is to be written: no end mark, but what announces an answer.
    """
    template = getattr(tokenizer, "template", None)
    prompted = any(turn.role in ("prompt", "completion") for turn in turns)
    if template is not None and not prompted:
        pieces, begin, end = _by_template(template, turns, answer_next), [], []
    else:
        marks = tokenizer.encode("")
        pieces, begin, end = _plain(turns, answer_next), marks[:-1], marks[-1:]
    tokens, learned = list(begin), [False] * len(begin)
    for text, learn in pieces:
        new = tokenizer.plain(text)
        tokens += new
        learned += [learn] * len(new)
    if not answer_next:
        tokens += end
        learned += [True] * len(end)
    return tokens, learned


def _plain(turns: Conversation, answer_next: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for turn in turns:
        if turn.role in ("prompt", "completion"):
            pieces.append((turn.text, turn.role in LEARNED))
        elif turn.role in LEARNED:
            pieces += [(f"{turn.role}: ", False), (f"{turn.text}\n", True)]
        else:
            pieces.append((f"{turn.role}: {turn.text}\n", False))
    prompted = bool(turns) and turns[-1].role == "prompt"
    return [*pieces, ("assistant: ", False)] if answer_next and not prompted else pieces


def _by_template(template: Any, turns: Conversation, answer_next: bool) -> list[Piece]:
    """Pieces of the whole rendered text; an answer ends where the template says."""
    pieces: list[Piece] = []
    done = ""
    for number, turn in enumerate(turns):
        if turn.role in LEARNED:
            done = _grown(pieces, done, template(turns[:number], True), False)
            done = _grown(pieces, done, template(turns[: number + 1], False), True)
    return pieces if not answer_next else [(template(turns, True), False)]


def _grown(pieces: list[Piece], done: str, whole: str, learned: bool) -> str:
    if not whole.startswith(done):
        raise ValueError(
            "the model's chat template changes earlier turns when later ones are added, so that "
            "answers cannot be told from prompts; use 'prompt' and 'completion'"
        )
    if whole != done:
        pieces.append((whole[len(done) :], learned))
    return whole
