"""The mutants that no test can notice, and why."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {
    "codec/blocked:BlockCodec.quantize: fused(self._quantize, values.device) if fuse else self._quantize"
    " -> self._quantize": "compiled coding has the bits of the plain chain; it is faster",
    "codec/blocked:BlockCodec._encode: True -> False": "the same",
    "codec/scaled:ScaledFormat.dequantize: codes.device.type != 'cpu' -> codes.device.type == 'cpu'": "panels bound the"
    " memory of a processor's decoding; all at once gives the same",
    "codec/linear:QuantizedLinear.dequantized: False -> True": "the bias is replaced at once",
    "layout/packing:shard_candidates: 1 -> 2": "a bucket without elements fits the first size",
    "cyclic/snapshot:Snapshots.blank_state_dict: False -> True": "a load replaces what is blank",
    "shard/unit:Root._place_caches: False -> True": "the end of a process frees its page-locked memory, too",
    "codec/base:Codec: 1 -> 2": "all codecs but FloatCodec set their block, and nothing asks FloatCodec for its",
}
"""By the mutant's name: why it changes no result."""
