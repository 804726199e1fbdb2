"""Keys and their limits, over HTTP and alone."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvrag.server.access import Account, ApiKey
from kvrag.server.app import ServerOptions
from kvrag.server.problems import LimitError
from tests.support.api_server import Served, lasting, serving
from tests.support.rag import PASSAGES, Rag
from tests.support.waiting import wait_until

LIMITS: dict[str, dict[str, int]] = {
    "free": {},
    "rpm": {"requests_per_minute": 2},
    "tpm": {"tokens_per_minute": 60},
    "one": {"concurrency": 1},
    "four": {"concurrency": 4},
    "short": {"max_prompt_tokens": 30},
    "operator": {"operator": True},
}
KEYS = {name: f"key-of-{name}-0123456789" for name in LIMITS}
BODY = {"model": "model", "prompt": "Ines keeps", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(rag: Rag) -> Iterator[Served]:
    keys = [ApiKey(name=name, key=KEYS[name], **limits) for name, limits in LIMITS.items()]
    with serving(rag.index, ServerOptions(keys=keys)) as running:
        yield running


@pytest.fixture
def post(guarded: Served) -> Iterator[Any]:
    with httpx.Client(base_url=guarded.url, timeout=30) as http:

        def send(name: str, body: Any = BODY, route: str = "/completions") -> httpx.Response:
            headers = {"Authorization": f"Bearer {KEYS.get(name, name)}"}
            return http.post(route, json=body, headers=headers)

        yield send


def test_without_the_right_key_nothing_is_answered(guarded: Served, post: Any) -> None:
    answer = post("wrong")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    root = guarded.server.url
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
        assert httpx.get(root + path).status_code == 401
        scheme = {"Authorization": f"Basic {KEYS['free']}"}
        assert httpx.get(root + path, headers=scheme).status_code == 401
    for path in ("/healthz", "/readyz"):
        assert httpx.get(root + path).json() == {"status": "ok"}
    key = {"Authorization": f"Bearer {KEYS['operator']}"}
    counted = httpx.get(f"{root}/metrics", headers=key).text
    for route in ("/v1/completions", "/v1/models", "/metrics", "other"):
        assert f'requests_total{{route="{route}",status="401"' in counted
    assert post("free").status_code == 200


def test_requests_a_minute(post: Any) -> None:
    assert [post("rpm").status_code for _ in range(3)] == [200, 200, 429]
    refused = post("rpm")
    assert 1 <= int(refused.headers["Retry-After"]) <= 30
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert post("free").status_code == 200


def test_each_method_counts(rag: Rag) -> None:
    limits = {"requests_per_minute": 8, "tokens_per_minute": 1}
    key = ApiKey(name="a", key=KEYS["rpm"], **limits)
    headers = {"Authorization": f"Bearer {key.key}"}
    with serving(rag.index, ServerOptions(keys=[key])) as served:
        assert httpx.post(f"{served.url}/completions", json=BODY, headers=headers).is_success
        # The tokens are used up, and reading takes none.
        assert httpx.get(f"{served.url}/models", headers=headers).status_code == 200
        refused = httpx.put(f"{served.url}/kvrag/documents/a.md", content=b"a", headers=headers)
        assert "tokens" in refused.json()["error"]["message"]
        for method in ("GET", "HEAD", "DELETE", "PATCH", "OPTIONS", "BREW"):
            answer = httpx.request(method, f"{served.url}/models", headers=headers)
            assert answer.status_code in (200, 405)
        refused = httpx.get(f"{served.url}/models", headers=headers)
        assert refused.status_code == 429
        assert "requests" in refused.json()["error"]["message"]
        assert httpx.get(f"{served.server.url}/healthz").status_code == 200


@pytest.mark.parametrize(
    ("tenants", "is_operator", "status"),
    [(("a", "b"), False, 403), (("a", "b"), True, 200), (("a", "a"), False, 200)],
)
def test_who_sees_the_metrics_of_all(
    rag: Rag, tenants: tuple[str, str], is_operator: bool, status: int
) -> None:
    keys = [
        ApiKey(name=name, key=KEYS[name], tenant=tenant, operator=is_operator)
        for name, tenant in zip(("rpm", "tpm"), tenants, strict=True)
    ]
    with serving(rag.index, ServerOptions(keys=keys)) as served:
        headers = {"Authorization": f"Bearer {KEYS['rpm']}"}
        answer = httpx.get(f"{served.server.url}/metrics", headers=headers)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "operator_only"
            assert "kvrag_" not in answer.text


def test_tokens_a_minute(post: Any) -> None:
    body = BODY | {"prompt": PASSAGES["ledger"], "max_tokens": 40}
    assert post("tpm", body).status_code == 200
    refused = post("tpm", body)
    assert refused.status_code == 429
    assert "tokens" in refused.json()["error"]["message"]
    assert post("free", body).status_code == 200


def test_only_accepted_prompts_are_charged_once_for_each_answer(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    monkeypatch.setattr(Account, "charge", lambda _, num_tokens: charged.append(num_tokens))
    key = ApiKey(name="a", key=KEYS["tpm"], tokens_per_minute=60)
    with serving(rag.index, ServerOptions(keys=[key], max_streams=2, max_waiting=0)) as served:
        headers = {"Authorization": f"Bearer {key.key}"}
        where = f"{served.url}/completions"
        assert httpx.post(where, json=BODY | {"n": 3}, headers=headers).status_code == 400
        assert charged == []
        assert httpx.post(where, json=BODY | {"n": 2}, headers=headers).status_code == 200
        one = httpx.post(where, json=BODY, headers=headers).json()
        assert charged[0] == 2 * one["usage"]["prompt_tokens"] > 0


def test_one_request_at_a_time(guarded: Served, post: Any) -> None:
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    where, body = f"{guarded.url}/completions", BODY | {"stream": True}
    with (
        lasting() as released,
        httpx.stream("POST", where, json=body, headers=headers, timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        assert post("one").status_code == 429
        released.set()
        assert post("free").status_code == 200
        assert "data: [DONE]" in list(lines)
    wait_until(lambda: post("one").status_code != 429)


def test_each_answer_of_a_request_counts(post: Any) -> None:
    for body in (BODY | {"n": 5}, BODY | {"prompt": ["Ines", "Tom", "Ada"], "n": 2}):
        refused = post("four", body)
        assert refused.status_code == 400
        assert "may have 4" in refused.json()["error"]["message"]
    assert post("four", BODY | {"prompt": ["Ines", "Tom"], "n": 2}).status_code == 200
    account = Account(ApiKey(name="a", key=KEYS["four"], concurrency=4))
    account.enter()
    account.add(2)
    account.enter()
    with pytest.raises(LimitError, match="4 answers"):
        account.add(1)
    account.leave(3)
    account.add(3)
