"""From a sample to tokens, and which of them are answers.

[Note: answers]
A sample is text (every token counts), a prompt with its completion, or a chat. Of the last two only answers count in the loss.
A chat is rendered by the tokenizer's template up to each answer and behind it; what lies between is the answer. Prompt and
answer are tokenized apart, as they will be when the model is used: it reads the prompt, and writes the rest.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unwall.train.errors import TrainError, missing
from unwall.train.files import BrokenSampleError

Piece = tuple[str, bool]
"""A stretch of text, and whether it is an answer."""


@dataclass(frozen=True)
class Document:
    """One sample."""

    ids: list[int]
    answers: list[bool] | None
    """Which tokens are answers. None: all of them, and the document may be cut anywhere."""


class Encoder:
    """A tokenizer, and what is known about its special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token_id
        self.pad = next((each for each in (tokenizer.pad_token_id, self._eos) if each is not None), 0)

    @property
    def closes(self) -> bool:
        """Whether samples end with a token that says so."""
        return self._eos is not None

    def encode(self, record: dict[str, Any]) -> Document | None:
        """See [Note: answers]. None where there is nothing to learn from."""
        if "messages" in record:
            return self._from_pieces(self._chat(record["messages"], record.get("tools")), special=False)
        if "prompt" in record and "completion" in record:
            prompt, completion = record["prompt"], record["completion"]
            if isinstance(prompt, list) and isinstance(completion, list):
                return self._from_pieces(self._chat([*prompt, *completion], record.get("tools")), special=False)
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise BrokenSampleError("prompt and completion are texts, or both are lists of messages")
            return self._from_pieces([(prompt, False), (completion, True)], special=True)
        if "text" in record:
            if not isinstance(record["text"], str):
                raise BrokenSampleError(f"text is a string, got {type(record['text']).__name__}")
            ids = self._closed(self._ids(record["text"], special=True)) if record["text"] else []
            return Document(ids, None) if len(ids) > 1 else None
        found = ", ".join(map(str, record)) or "nothing"
        raise BrokenSampleError(f"has no text, no prompt with a completion and no messages (it has {found})")

    def _from_pieces(self, pieces: list[Piece], *, special: bool) -> Document | None:
        """``special``: the tokenizer puts its own tokens around the first piece, and the end is marked."""
        ids: list[int] = []
        answers: list[bool] = []
        for number, (text, answer) in enumerate(pieces):
            found = self._ids(text, special=special and number == 0) if text or (special and number == 0) else []
            if special and number == 0 and found and found[-1] == self._eos:
                found = found[:-1]  # the prompt is not the end
            if special and answer:
                found = self._closed(found)
            ids += found
            answers += [answer] * len(found)
        return Document(ids, answers) if any(answers[1:]) else None

    def _chat(self, messages: Any, tools: Any) -> list[Piece]:
        if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
            raise BrokenSampleError("messages is a list of objects with a role and a content")
        if not self._tokenizer.chat_template:
            raise TrainError(
                "the data holds chats, but the tokenizer has no chat template: use a tokenizer of a chat model "
                "(--tokenizer DIR), or prompt and completion instead of messages"
            )
        messages = [{key: value for key, value in each.items() if value is not None} for each in messages]
        whole = self._render(messages, tools)
        pieces: list[Piece] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, add_generation_prompt=True)
            behind = self._render(messages[: number + 1], tools)
            if not (whole.startswith(before) and whole.startswith(behind) and done <= len(before) <= len(behind)):
                continue  # the template shows this answer otherwise once others follow: nothing to learn from it here
            pieces += [(whole[done : len(before)], False), (whole[len(before) : len(behind)], True)]
            done = len(behind)
        if not pieces:
            raise BrokenSampleError("has no message of the role assistant that the chat template leaves as it is")
        return pieces

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, add_generation_prompt: bool = False) -> str:
        if not messages:
            return ""
        try:
            found: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template raises what it likes
            said = (str(error).strip().splitlines() or [""])[0]
            raise BrokenSampleError(f"the chat template refuses it: {said or type(error).__name__}") from None
        return found

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            found: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        except (TypeError, UnicodeError):  # what tokenizers say to text that is none
            raise BrokenSampleError(_half_of(text)) from None
        return found

    def _closed(self, ids: list[int]) -> list[int]:
        return ids if self._eos is None or (ids and ids[-1] == self._eos) else [*ids, self._eos]


def _half_of(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half a character, {text[error.start]!a} at {error.start}, as a text that was cut does"
    return "the tokenizer refuses it"


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a directory. TrainError where it is none, or one of another model."""
    try:
        import transformers
    except ImportError:
        raise missing("transformers", "unwall train") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever transformers makes of a directory without a tokenizer
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainError(f"{folder}: no tokenizer that transformers can load ({said}); give one with --tokenizer DIR") from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise TrainError(
            f"the tokenizer of {folder} does not match the model: it has tokens up to {largest}, the model has {vocab_size}; "
            "use the model's own tokenizer (--tokenizer DIR), or resize the model's embeddings first"
        )
    if largest < 0:
        raise TrainError(f"{folder}: the tokenizer has no tokens; use the model's own (--tokenizer DIR)")
    return tokenizer
