"""Which tokens of a conversation the assistant wrote: the loss mask of supervised fine-tuning.

The conversation is rendered and tokenised as a whole. Tokenising message by message and joining the pieces would give
other tokens at the seams than the model sees when it is used.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence

from megarl.config.errors import ConfigError
from megarl.data.chat import ChatTokenizer, Message, UnusableMessages

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
"""`{% generation %}`, by which a template can say what the assistant writes (transformers, "Chat templates")."""

_ASSISTANT = "assistant"

Span = tuple[int, int]
"""Characters [start, stop) of a rendered conversation."""

_PROBE = (
    ("user", "first question"),
    (_ASSISTANT, "first answer"),
    ("user", "second question"),
    (_ASSISTANT, "last answer"),
)
"""A conversation to try a template on. Its texts need not be in the tokenizer's vocabulary."""


class TurnMasker:
    """Finds the assistant's turns by the model's chat template.

    A turn begins where its generation prompt ends (or where its `{% generation %}` mark is), and ends with the first
    end token after that, inclusive: just what the model would generate. What the template writes between an end token
    and the next message (a line break in ChatML) is not learned.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        """Tries the template, so that one that cannot serve is refused before any row is read.

        Raises:
            ConfigError: the tokenizer has no character offsets, or the template does not show where turns end.
        """
        self._chat = chat
        if not chat.tokenizer.is_fast:
            raise ConfigError(
                f"model.path {chat.path}: its tokenizer gives no character offsets, which the loss mask needs; add a "
                "tokenizer.json."
            )
        self._has_marks = bool(_GENERATION_MARK.search(chat.tokenizer.get_chat_template()))
        if not self._has_marks:
            self._try_template()

    def encode(self, messages: Sequence[Message], learn_from: int = 0) -> tuple[list[int], list[int]]:
        """Token ids of a whole conversation, and 1 for each token that is learned, 0 elsewhere.

        Args:
            learn_from: assistant turns from this message on are learned; those before it are context.

        Raises:
            UnusableMessages: no assistant turn to learn, or the template writes this conversation in a way that hides
                where its turns begin or end.
        """
        turns = _assistant_turns(messages)
        if not any(number >= learn_from for number in turns):
            raise UnusableMessages("has no assistant message to learn")
        text, spans = self._marked(messages) if self._has_marks else self._prompted(messages)
        if len(spans) != len(turns):
            raise UnusableMessages(
                f"has {len(turns)} assistant messages, but the model's chat template marks {len(spans)} with "
                "{% generation %}"
            )
        ids, offsets = self._tokenise(text)
        mask = [0] * len(ids)
        for number, span in zip(turns, spans, strict=True):
            start, stop = self._turn_tokens(ids, offsets, span)
            if number >= learn_from:
                mask[start:stop] = [1] * (stop - start)
        ids, added = self._chat.one_bos(ids)
        return ids, [0] * added + mask[max(0, -added) :]

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text, and each mark together with the character after it: some marks leave the end token out."""
        text, marks = self._chat.render_marked(messages)
        return text, [(start, stop + 1) for start, stop in marks]

    def _prompted(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text, and each turn from the end of its generation prompt to the start of the next turn."""
        text = self._chat.render(messages, generation_prompt=False)
        starts = []
        for number in _assistant_turns(messages):
            if number == 0:
                raise UnusableMessages("begins with an assistant message, which has nothing to answer")
            prompt = self._chat.render(messages[:number], generation_prompt=True)
            if not text.startswith(prompt):
                raise UnusableMessages(
                    f"is rewritten by the model's chat template: message {number} does not stand behind its generation "
                    "prompt, so what is learned is not known; mark it with {% generation %} in the template"
                )
            starts.append(len(prompt))
        return text, list(itertools.pairwise([*starts, len(text)]))

    def _tokenise(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids, and the characters of each."""
        encoded = self._chat.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), encoded["offset_mapping"]

    def _turn_tokens(self, ids: Sequence[int], offsets: Sequence[Span], span: Span) -> tuple[int, int]:
        """The tokens [start, stop) of a turn that begins with a span of characters and ends with an end token in it.

        A token across the beginning holds characters that the assistant wrote: it is the turn's.
        """
        start = bisect.bisect_right(offsets, span[0], key=lambda offset: offset[1])
        limit = bisect.bisect_left(offsets, span[1], key=lambda offset: offset[0])
        for position in range(start, limit):
            if ids[position] in self._chat.end_token_ids:
                return start, position + 1
        raise UnusableMessages(
            "has an assistant message that the model's chat template does not close with an end token"
        )

    def _try_template(self) -> None:
        """Refuses a template that closes only user messages: a turn would seem to end with the next question."""
        messages = [{"role": role, "content": content} for role, content in _PROBE]
        try:
            text, spans = self._prompted(messages)
            ids, offsets = self._tokenise(text)
            first_end, last_end = (offsets[self._turn_tokens(ids, offsets, span)[1] - 1][0] for span in spans)
        except UnusableMessages as error:
            raise self._refusal(f"a conversation of two turns {error}") from None
        places = [text.find(content) for _, content in _PROBE]
        if not (places[1] < first_end < places[2] and places[3] < last_end):
            raise self._refusal("it does not write an end token after an assistant message")

    def _refusal(self, reason: str) -> ConfigError:
        ends = ", ".join(self._chat.tokenizer.convert_ids_to_tokens(list(self._chat.end_token_ids)))
        return ConfigError(
            f"model.path {self._chat.path}: its chat template does not show what the assistant writes ({reason}): mark "
            f"that with {{% generation %}} in the template, and close it with an end token ({ends})."
        )


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == _ASSISTANT]
