"""Fitting an index's codec to its model and documents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvrag.arguments import shown
from kvrag.chunk import Chunk, ChunkKey
from kvrag.errors import DocumentError, ParameterError, ProfileError
from kvrag.ingest.config import no_kv
from kvrag.ingest.encoders import Encoders
from kvrag.ingest.maintenance import audit_rows, recode_records
from kvrag.ingest.storage import Storage
from kvrag.plugins import document_failures

if TYPE_CHECKING:
    from kvrag.codec.base import Codec
    from kvrag.codec.config import CodecChoice, PipelineConfig
    from kvrag.codec.profile import Profile
    from kvrag.ingest.stages import Outcome
    from kvrag.kvcache import ChunkKV


def _stages(codec: str) -> PipelineConfig:
    """Return the stages of a codec. Raises ParameterError if it has none."""
    from kvrag.codec.config import choose_codec

    stages = choose_codec(codec).config
    if stages is None:
        raise ParameterError(f"codec {shown(codec)} needs no profile")
    return stages


class CodecFitter:
    """Fits the codec that an index writes with; the caller holds the writer's lock.

    Parameters
    ----------
    storage, encoders
        The storage and the encoders of the index.

    Attributes
    ----------
    failed_tokens
        Tokens of the chunks that could not be fitted to, since an ingestion began.
    """

    def __init__(self, storage: Storage, encoders: Encoders) -> None:
        self._storage = storage
        self._encoders = encoders
        self.failed_tokens = 0

    def codec_for(self, chunks: list[Chunk], say: Callable[[str], None]) -> Codec:
        """Return the codec for new records; fits its profile to `chunks` if it has none.

        Too small a set of chunks is stored raw, until there are more.
        """
        storage = self._storage
        if not storage.coding.needs_profile:
            return storage.coding.codec
        lengths = [len(chunk.token_ids) for chunk in chunks]
        codec = storage.config.codec
        transform = _stages(codec).transform
        least, sample_tokens = transform.tokens_to_fit(storage.config.spec), transform.sample_tokens
        if transform.is_fitted_late:  # by `catch_up`, unless much would be written twice
            least, sample_tokens = 4 * sample_tokens, sample_tokens // 2
        # After a failure twice as many: each attempt computes a sample.
        if sum(lengths) < max(least, 2 * self.failed_tokens):
            return storage.coding.codec
        try:
            profile = self._fit(
                codec,
                lengths,
                lambda number: self._encoders.prefill(chunks[number]),
                say,
                sample_tokens,
            )
        except (DocumentError, ParameterError):  # too few chunks whose KV can be computed
            self.failed_tokens = sum(lengths)
            return storage.coding.codec
        self._record(codec, profile, say)
        return storage.coding.codec

    def catch_up(self, outcome: Outcome, say: Callable[[str], None]) -> str:
        """Fit the codec if it waits for a profile and there is enough now.

        Returns a note on how an ingestion stored KV; "" if there is nothing to say. What is
        written again counts as the ingestion's size.
        """
        storage = self._storage
        codec = storage.config.codec
        self.failed_tokens = 0
        if storage.coding.needs_profile:
            raw, least = self.needed(), _stages(codec).transform.tokens_to_fit(storage.config.spec)
            if sum(raw.values()) < least:
                return f"KV is stored raw until the index holds {least:,} tokens to fit {codec} to"
            try:
                profile = self.fit(codec, raw, say)
            except (DocumentError, ParameterError) as error:
                return f"KV was stored raw: {error}"
            outcome.size_bytes = self._record(codec, profile, say)
        if storage.config.profile:
            num_tokens = storage.profiles.get(storage.config.profile).num_tokens
            if num_tokens < _stages(codec).transform.sample_tokens // 4:
                return (
                    f"{codec} was fitted on {num_tokens:,} tokens only; 'kvrag recode --codec "
                    f"{codec}' fits it again when the index holds more"
                )
        return ""

    def fit(
        self,
        codec: str,
        needed: dict[ChunkKey, int],
        say: Callable[[str], None],
        num_tokens: int | None = None,
    ) -> Profile:
        """Fit a codec to a sample of the index's records.

        Parameters
        ----------
        codec
            Any codec that has a profile.
        needed
            The records (`needed`).
        say
            Receives a line of text for each step.
        num_tokens
            Tokens in the sample; by default what suits the codec.
        """
        from kvrag.ingest.coding import read_exact

        storage = self._storage
        if not storage.config.has_kv:
            raise ParameterError(f"no codec can be fitted: {no_kv(storage.path)}")
        keys = list(needed)

        def kv_of(number: int) -> ChunkKV:
            key = keys[number]
            spec = storage.config.spec
            found = read_exact(key, needed[key], storage.store, storage.coding, spec)
            return self.compute(key) if found is None else found

        return self._fit(codec, list(needed.values()), kv_of, say, num_tokens)

    def compute(self, key: ChunkKey) -> ChunkKV:
        """Compute the KV of a record with the model."""
        return self._encoders.prefill(self._storage.catalog.stored.chunk_with(key))

    def repair(self, key: ChunkKey) -> None:
        """Compute the KV of a record again, and put it into the store."""
        storage = self._storage
        record = storage.coding.codec.encode(key, self.compute(key))
        storage.store.replace(key, record)
        if storage.home is not storage.store:
            storage.home.replace(key, record)  # at once, and not when its turn comes

    def needed(self) -> dict[ChunkKey, int]:
        """Return the names of all records of sound chunks, each with its number of rows.

        Optional records are among them if the store has them.
        """
        storage = self._storage
        audit = audit_rows(storage.catalog)
        found = {key: n for key, n in audit.optional.items() if storage.store.contains(key)}
        found |= audit.needed
        return {key: found[key] for key in sorted(found)}

    def present_profile(self, choice: CodecChoice, num_tokens: int) -> Profile | None:
        """Return the index's best profile for a codec, or None if none is good enough.

        A profile fitted on far fewer tokens than there are now is not: an index starts small.
        """
        from kvrag.codec.registry import is_profile_of

        storage = self._storage
        fitting: list[Profile] = []
        for profile_hash in set(storage.profiles.hashes()) - {storage.config.writer}:
            with contextlib.suppress(ProfileError):
                profile = storage.profiles.get(profile_hash)
                is_ours = profile.model_fingerprint == storage.config.model_fingerprint
                has_level = any(level.name == choice.level for level in profile.levels)
                if is_ours and has_level and is_profile_of(profile, choice):
                    fitting.append(profile)
        best = max(fitting, key=lambda profile: (profile.num_tokens, profile.hash), default=None)
        most = _stages(choice.label).transform.sample_tokens
        if best is None or best.num_tokens < min(most, num_tokens) / 2:
            return None
        return best

    def replace_lost_profile(self) -> None:
        """Fit another profile if the current codec's profile is lost."""
        storage = self._storage
        if storage.coding.needs_profile:
            return
        try:
            _ = storage.coding.codec
        except ProfileError:
            codec = storage.config.codec
            profile = self.fit(codec, self.needed(), lambda _: None)
            self._record(codec, profile, lambda _: None)

    def _record(self, codec: str, profile: Profile, say: Callable[[str], None]) -> int:
        """Write records with a profile of the index's codec, if it has that codec still.

        What waited for a profile is coded first: the next ingestion completes one that was killed.
        Returns how many bytes those records have then.
        """
        from kvrag.ingest.coding import RecordCoding

        storage = self._storage
        storage.profiles.add(profile)
        size_bytes = 0
        if raw := self.needed() if storage.coding.needs_profile else {}:
            storage.save_config({})  # which publishes the profile, where others read the records
            say(f"writing {len(raw):,} records again as {codec}")
            coding = RecordCoding(
                storage.profiles, codec, profile.hash, storage.config.model_fingerprint
            )
            size_bytes = recode_records(storage, raw, self.compute, None, coding).size_bytes
        storage.save_config({"profile": profile.hash}, codec)
        return size_bytes

    def _fit(
        self,
        codec: str,
        lengths: Sequence[int],
        kv_of: Callable[[int], ChunkKV],
        say: Callable[[str], None],
        num_tokens: int | None = None,
    ) -> Profile:
        """Fit a codec to a sample of chunks, given their lengths and what returns their KV."""
        from kvrag.codec.base import check_kv
        from kvrag.codec.fitting import fit_profile
        from kvrag.ingest.coding import spread_evenly

        stages, config = _stages(codec), self._storage.config
        sample = spread_evenly(lengths, num_tokens or stages.transform.sample_tokens)
        reasons: list[str] = []

        def computed() -> Iterator[ChunkKV]:
            for done, number in enumerate(sample):
                say(f"computing chunk {done + 1:,} of {len(sample):,} of the sample")
                # One that fails is left out here, and refused when its record is made.
                with document_failures(reasons.append):
                    kv = kv_of(number)
                    try:
                        check_kv(kv)
                    except ParameterError as error:  # NaN or infinity
                        raise DocumentError(str(error)) from error
                    yield kv
            if sample and len(reasons) == len(sample):
                raise DocumentError(f"no chunk of the sample can be used: {reasons[0]}")

        return fit_profile(stages, config.spec, config.model_fingerprint, computed(), say)
