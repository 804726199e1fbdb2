"""Chat templates that write tools, in the forms of the common families; written for the tests."""

from pathlib import Path

HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, XML = (
    (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
    for name in ("hermes", "llama", "mistral", "mistral_named", "xml")
)
# XML knows tools, but writes calls in a form that is no other's.
