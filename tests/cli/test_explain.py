from pathlib import Path

from kvrag.ingest.index import Index


def test_every_part_of_a_prompt_is_explained(run, index_folder, tmp_path: Path) -> None:
    with Index.open(index_folder) as index:
        (chunk, *_) = [hit.chunk for hit in index.search("harbour ledger", 1)]
    prompt = f"Use \x1b[31mthis\x1b[0m:\n\n{chunk.text}\n\nWho keeps it?"
    (tmp_path / "prompt.txt").write_text(prompt)
    done = run("explain", tmp_path / "prompt.txt", "-i", index_folder, "--json").json
    parts, report = done["parts"], done["report"]
    assert "".join(one["text"] for one in parts) == prompt
    numbers = {"exact": 0, "reused": 0, "repaired": 0, "fresh": 0}
    end = 0
    for one in parts:
        assert one["start"] == end
        end = one["end"]
        numbers[one["state"]] += end - one["start"]
    assert end == report["num_tokens"]
    assert numbers["fresh"] == report["num_fresh"] == sum(report["fresh_reasons"].values())
    assert numbers["exact"] == report["num_exact"]
    assert numbers["reused"] > 0
    assert any(one["why"].startswith(chunk.source) for one in parts)
    shown = run("explain", tmp_path / "prompt.txt", "-i", index_folder).out
    assert "not in the index" in shown
    assert "\x1b[31mthis" not in shown
