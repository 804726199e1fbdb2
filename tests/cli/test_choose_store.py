from pathlib import Path

from tests.cli.conftest import Run
from tests.cli.test_calibrate import QUESTION, SMALL


def test_the_cheapest_store_that_is_fast_enough(
    run: Run, index_folder: Path, tmp_path: Path
) -> None:
    dear, cheap = f"file:{tmp_path / 'dear'}", f"file:{tmp_path / 'cheap'}"
    asked = ("choose-store", "-i", index_folder, "--stores", f"{dear}|{cheap}")
    before = run(*asked, code=1)
    assert "run 'kvrag calibrate' first" in before.err

    run("calibrate", "-i", index_folder, *SMALL)
    path = index_folder / "prices.toml"
    assert "EXAMPLES" in path.read_text()
    path.write_text(f'["file:"]\ngb_month = 9\n["{cheap}"]\ngb_month = 1\n')
    done = run(*asked, "--json")
    offers = {offer["store"]: offer for offer in done.json["offers"]}
    assert offers.keys() == {dear, cheap}
    assert offers[dear]["month"] == 9 * offers[cheap]["month"]
    assert all(offer["load_seconds"] > 0 for offer in offers.values())
    limit = done.json["recompute_seconds"]
    hiding = [one for one in offers.values() if one["load_seconds"] <= limit]
    least = "month" if hiding else "load_seconds"
    assert done.json["chosen"] == min(hiding or offers.values(), key=lambda one: one[least])
    assert done.json["moved"] is None

    moved = run(*asked, "--move")
    assert "moved: " in moved.out
    assert "a month" in moved.out
    answered = run("query", "-i", index_folder, QUESTION, "--max-tokens", 2, "--json")
    assert answered.json["report"]["misses"] == {}
    assert answered.json["report"]["num_chunks"] > 0


def test_what_cannot_be_placed_says_why(run: Run, index_folder: Path, tmp_path: Path) -> None:
    run("calibrate", "-i", index_folder, *SMALL)
    tiers = run(
        "choose-store", "-i", index_folder, "--stores", f"tiered:memory:|file:{tmp_path}", code=1
    )
    assert "expected persistent stores" in tiers.err
    prices = tmp_path / "prices.toml"
    prices.write_text('["s3:"]\ngb_month = 1\n')
    asked = ("choose-store", "-i", index_folder, "--prices", prices)
    unknown = run(*asked, "--stores", f"file:{tmp_path / 'kv'}", code=1)
    assert "has no price of file:" in unknown.err
    for reads in ("nan", "inf"):
        many = run(*asked, "--stores", f"file:{tmp_path / 'kv'}", "--reads", reads, code=(1, 2))
        assert "reads" in many.err
    run(*asked, "--stores", "s4://bucket", code=1)
    assert "expected persistent stores" in run(*asked, "--stores", "", code=1).err
    run(*asked, "--stores", "s3://bucket", "--reads", "-1", code=(1, 2))
