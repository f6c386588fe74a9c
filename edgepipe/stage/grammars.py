"""The served model's vocabulary for grammars, read at the first request with a grammar, then kept."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgepipe.errors import FeatureMissing
from edgepipe.sampling.grammar import GrammarTokenizer
from edgepipe.spec.facts import ModelConfig
from edgepipe.text.tokenizer import Tokenizer

OpenTokenizer = Callable[[], Tokenizer]
"""Opens the served model's tokenizer. Blocks for some 100 ms. Raises ModelInvalid."""


class Grammars:
    """Keeps the loaded model's vocabulary; used on the threads that compile grammars."""

    def __init__(self, open_tokenizer: OpenTokenizer | None) -> None:
        self._open_tokenizer = open_tokenizer
        self._config: ModelConfig | None = None
        self._tokenizer: GrammarTokenizer | None = None
        self._lock = threading.Lock()

    def use(self, config: ModelConfig) -> None:
        """Switch to another loaded model."""
        with self._lock:
            self._config, self._tokenizer = config, None

    def open(self) -> GrammarTokenizer:
        """Return the vocabulary of the loaded model. Raises FeatureMissing, ModelInvalid."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make()
            return self._tokenizer

    def _make(self) -> GrammarTokenizer:
        config = self._config
        if self._open_tokenizer is None or config is None or not config.eos_token_ids:
            raise FeatureMissing(
                "structured output is not possible with this model",
                fact="its end token is not known" if config is not None else "it has no tokenizer here",
                next_step="send the request without response_format and tools",
            )
        tokenizer = self._open_tokenizer()
        return GrammarTokenizer(
            [tokenizer.token_bytes(token) for token in range(config.vocab_size)],
            encode=lambda text: tokenizer.encode(text, add_special=False),
            end_ids=config.eos_token_ids,
            special_ids=sorted(tokenizer.hidden_ids),
        )
