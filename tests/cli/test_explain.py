from pathlib import Path

from kvrag.chunk import Document
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


def test_a_file_that_is_no_text(run, index_folder, tmp_path: Path) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\x00")
    for name, said in (("prompt.bin", "is not UTF-8 text"), ("absent", "cannot read")):
        assert said in run("explain", tmp_path / name, "-i", index_folder, code=1).err


def test_a_first_chunk_is_fresh_once_and_exact_afterwards(run, tmp_path: Path) -> None:
    text = "Ines keeps the harbour ledger of Varn, by the old river bank near the northern light."
    folder, prompt = tmp_path / "index", tmp_path / "prompt.txt"
    with Index.create(
        folder, model="kvrag-tiny", embedding="hashing", context="filler:20"
    ) as index:
        index.add(Document("ledger", text))
        head = index.tokenizer.decode(index.prefix_ids[1:])  # the tokenizer adds the first one
    prompt.write_text(f"{head}{text}\n\nWho keeps it?")
    states = []
    for _ in range(2):
        parts = run("explain", prompt, "-i", folder, "--json").json["parts"]
        states.append({one["state"]: one["why"] for one in parts if "Ines" in one["text"]})
    assert states == [{"fresh": "computed to be stored"}, {"exact": "ledger, chunk 0"}]
