"""Client of one SGLang server's HTTP API. It knows requests and answers, not what they are for."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import requests


class ClientError(Exception):
    """The server could not be reached, refused a request, or answered something unexpected."""


class NoMetrics(ClientError):
    """The server exports no metrics."""


SOURCES = ("device", "host", "storage")
"""Where a cached token came from."""


@dataclass(frozen=True)
class Generation:
    """One answer of ``/generate``.

    Attributes:
        output_ids: generated token ids.
        logprobs: natural-log probability of each of them, the engine's float32 values unrounded.
        cached_tokens: prompt tokens that were not computed.
        cached_by: those of them by each of :data:`SOURCES`.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    cached_by: dict[str, int]


class Message(NamedTuple):
    """One answer of the chat endpoint: thinking and content, and the tokens of the prompt."""

    text: str
    prompt_tokens: int


class SGLangClient:
    """Speaks to the server at ``base_url``, directly: proxies of the environment are not used.

    Args:
        base_url: ``http://host:port``.
        timeout_s: for one answer, in seconds.
        api_key: of a server that was launched with one.
    """

    def __init__(
        self, base_url: str, *, timeout_s: float = 300.0, api_key: str | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._session = requests.Session()
        self._session.trust_env = False
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        self._session.close()

    def healthy(self) -> bool:
        """Whether the server can generate a token now. A refused connection is a no."""
        try:
            answer = self._session.get(f"{self.base_url}/health", timeout=self._timeout_s)
        except requests.RequestException:
            return False
        return answer.status_code == 200

    def server_info(self) -> dict[str, Any]:
        """Resolved arguments, ``version`` and scheduler state.

        Raises:
            ClientError: no usable answer.
        """
        return self._json(self._request("GET", "/server_info"))

    def model_info(self) -> dict[str, Any]:
        """``model_path``, ``architectures`` and so on.

        Raises:
            ClientError: no usable answer.
        """
        return self._json(self._request("GET", "/model_info"))

    def metrics(self) -> str:
        """What the server exports, in Prometheus' text format.

        Raises:
            NoMetrics: it was launched without ``--enable-metrics``.
            ClientError: no usable answer.
        """
        answer = self._send("GET", "/metrics")
        if answer.status_code == 404:
            raise NoMetrics(
                f"{self.base_url}: the server exports no metrics; launch it with --enable-metrics"
            )
        if answer.status_code != 200:
            raise self._refused(answer, "/metrics")
        return answer.text

    def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache on device and host; a busy server is asked until it is idle.

        Raises:
            ClientError: still refused after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._send("POST", "/flush_cache", params={"timeout": 5})
            if answer.status_code == 200:
                return
            if time.monotonic() >= deadline:
                raise self._refused(answer, "/flush_cache")
            # Writes to the host may outlast the requests that caused them.
            time.sleep(0.1)

    def generate(self, input_ids: Sequence[int], *, max_new_tokens: int) -> Generation:
        """Greedy continuation of exactly ``max_new_tokens`` tokens, with logprobs.

        Raises:
            ClientError: no usable answer.
        """
        return self.generate_batch([input_ids], max_new_tokens=max_new_tokens)[0]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
    ) -> list[Generation]:
        """As :meth:`generate` for several prompts that the server receives together.

        Raises:
            ClientError: no usable answer.
        """
        request = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        answers = self._json(self._request("POST", "/generate", json=request))
        try:
            generations = [_generation(answer) for answer in answers]
        except (KeyError, TypeError, ValueError) as error:
            raise ClientError(
                f"{self.base_url}/generate: unexpected answer ({error!r}): {answers}"
            ) from error
        if len(generations) != len(prompts):
            raise ClientError(
                f"{self.base_url}/generate: {len(generations)} answers to {len(prompts)} prompts"
            )
        for generation in generations:
            if len(generation.output_ids) != max_new_tokens:
                raise ClientError(
                    f"{self.base_url}/generate: {len(generation.output_ids)} tokens instead of "
                    f"{max_new_tokens}"
                )
        return generations

    def complete(self, text: str, *, max_tokens: int) -> str:
        """Greedy continuation of ``text``, up to ``max_tokens`` tokens.

        Raises:
            ClientError: no usable answer.
        """
        body = {"model": "", "prompt": text, "temperature": 0, "max_tokens": max_tokens}
        answer = self._json(self._request("POST", "/v1/completions", json=body))
        try:
            return str(answer["choices"][0]["text"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._unexpected("/v1/completions", answer) from error

    def chat(self, text: str, *, max_tokens: int, thinking: bool = False) -> Message:
        """Greedy answer to one message.

        Args:
            thinking: ask for it; otherwise the server's default holds.

        Raises:
            ClientError: no usable answer.
        """
        body: dict[str, Any] = {
            "model": "",
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if thinking:
            body["chat_template_kwargs"] = {"thinking": True}
        answer = self._json(self._request("POST", "/v1/chat/completions", json=body))
        try:
            message = answer["choices"][0]["message"]
            parts = (message.get("reasoning_content"), message["content"])
            tokens = int(answer["usage"]["prompt_tokens"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._unexpected("/v1/chat/completions", answer) from error
        return Message("".join(part for part in parts if part), tokens)

    def _unexpected(self, path: str, answer: Any) -> ClientError:
        return ClientError(f"{self.base_url}{path}: unexpected answer: {answer}")

    def _request(self, method: str, path: str, **arguments: Any) -> requests.Response:
        answer = self._send(method, path, **arguments)
        if answer.status_code != 200:
            raise self._refused(answer, path)
        return answer

    def _send(self, method: str, path: str, **arguments: Any) -> requests.Response:
        try:
            return self._session.request(
                method, self.base_url + path, timeout=self._timeout_s, **arguments
            )
        except requests.RequestException as error:
            raise ClientError(f"{self.base_url}{path}: {error}") from error

    def _json(self, answer: requests.Response) -> Any:
        try:
            return answer.json()
        except requests.JSONDecodeError as error:
            raise ClientError(f"{answer.url}: not JSON: {answer.text[:500]}") from error

    def _refused(self, answer: requests.Response, path: str) -> ClientError:
        remedy = (
            "; give the --api-key that it was launched with" if answer.status_code == 401 else ""
        )
        said = answer.text[:500].strip()
        return ClientError(f"{self.base_url}{path}: status {answer.status_code}: {said}{remedy}")


def _is_float32(value: float) -> bool:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        return False


def _generation(answer: dict[str, Any]) -> Generation:
    meta = answer["meta_info"]
    entries = meta["output_token_logprobs"]
    output_ids = tuple(int(token) for _, token, *_ in entries)
    logprobs = tuple(float(logprob) for logprob, *_ in entries)
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("a logprob is not finite")
    if not all(map(_is_float32, logprobs)):
        raise ValueError("a logprob is not a float32 number: it was rounded on the way")
    # SGLang leaves the details out when nothing was cached.
    details = meta.get("cached_tokens_details") or {}
    return Generation(
        output_ids=output_ids,
        logprobs=logprobs,
        cached_tokens=int(meta["cached_tokens"]),
        cached_by={source: int(details.get(source, 0)) for source in SOURCES},
    )
