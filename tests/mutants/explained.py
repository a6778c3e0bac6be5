"""The mutants that the nearest tests do not notice, and why."""

from __future__ import annotations

EXPLAINED: dict[str, str] = {
    "layers/scaled:ScaledFormat.dequantize: codes.device.type != 'cpu' -> codes.device.type == 'cpu'": "panels bound"
    " the memory of a processor's decoding; all at once gives the same",
    "layers/linear:QuantizedLinear.dequantized: False -> True": "the bias is replaced at once",
    "layout/packing:shard_candidates: 1 -> 2": "a bucket without elements fits the first size",
    "cyclic/snapshot:Snapshots.blank_state_dict: False -> True": "a load replaces what is blank",
    "cyclic/worker:Worker.begin_run: self.settings.clear() -> pass": "each batch writes its own before they are read",
    "codec/lossless_gradients_numba:encode: 1 -> 2": "more memory than a message takes",
    "codec/lossless_gradients_numba:_encode: step > 1 -> step >= 1": "the upper half twice is zero where it is once",
    "codec/lossless_gradients_numba:_encode: 0 -> 1 #7": "no top is below 6",
    "codec/lossless_gradients_triton:_count_outside: 8 -> 9": "a word has no ninth code",
    "codec/messages:ToldLengths._read_gathered: 0 -> 1": "a message has at least its head",
    "codec/messages:ToldLengths.start_exchange: 1 -> 2 #2": "a message with one value is short, so it tells no rate",
    "codec/messages:ToldLengths._read_exchanged: most > rate -> most >= rate": "a second transfer of nothing",
    "codec/messages:ToldLengths._read_exchanged: 0 -> 1": "a rank's message to itself has no meaning",
    "codec/messages:_numbers: -1 -> 1": "a message has at least its head",
    "codec/messages:_numbers: 1 -> 2": "the same",
    "layout/bucket:RunsLayout.slots: 0 -> 1": "the tensor has no place in a bucket",
    "shard/extension:_no_guard: return Observer -> return None": "the package sets another one at once",
    "store/folder:not_seen: time.sleep(_POLL_S) -> pass": "it looks more often",
    "codec/lossless_numba:find_exponents: 1 -> 2 #6": "entries behind the last value are of no value",
    "islands/saved_state:_plan: sorted({place.island for place in places} - origins.keys()) ->"
    " list({place.island for place in places} - origins.keys())": "islands have the numbers from 0 on, which"
    " a set lists in order",
    "shard/ledger:Ledger.reset_peak: 0 -> 1": "a byte more of a peak",
    "checkpoint/islands:IslandSlices: 0 -> 1 #2": "nobody asks which island's own the slices of a checkpoint are",
    "ragged/packing:ShardPacking.write: own.zero_() -> pass": "nobody reads what lies between sections",
    "guard/comparison:IssuedProgram.__init__: 0 -> 1 #2": "any first digest serves that is the same on all ranks",
    "guard/checksum:_sum_of_long_words: memory[:end].view(torch.int64).sum() + memory[end:].sum(dtype=torch.int64) ->"
    " memory[:end].view(torch.int64).sum() - memory[end:].sum(dtype=torch.int64)": "any sum serves that is the same on"
    " all ranks",
    "comm/cluster:Cluster.over: sorted(ranks) -> list(ranks)": "torch sorts the ranks of a group, and equal meshes have"
    " one cluster",
    "publish/reader:Reader.patches: 0 -> 1": "there are as many values as places",
    "optim/adamw8bit:_step_8bit: 0 -> 1": "both moments have scales of one shape",
    "shard/placement:Passing: 0 -> 1 #2": "a byte more of a peak",
    "shard/placement:Passing: 0 -> 1 #3": "a byte more of a peak",
    "shard/cache:NodeShard.allocate: self.buffer() -> pass": "the first gather allocates it",
    "shard/gather:BucketGather.make_room: self.now.begun is None -> self.now.begun is not None": "`start_local` takes"
    " the memory",
    "shard/gather:BucketGather.finish: self.store() -> pass": "whoever reads it next stores it",
    "ragged/tensor:RaggedTensor.redistribute: False -> True": "the result is complete with either",
    "shard/crossing:Copies.__init__: 0 -> 1": "the first crossing is exact, and sets it",
    "shard/gather:BucketGather.__init__: node.is_stream_ordered and self._local.is_stream_ordered"
    " -> node.is_stream_ordered or self._local.is_stream_ordered": "both levels have one kind of backend",
    "publish/publisher:Publisher._begin_run: continue -> pass": "nothing follows in the loop",
    "comm/journal:Ticket.tag: 1 -> 2": "any number serves that is the same on all ranks",
    "codec/base:Codec: 1 -> 2": "all codecs but FloatCodec set their block, and nothing asks FloatCodec for its",
}
"""By the mutant's name: why it changes no result."""

MISSED: dict[str, str] = {
    "shard/cache:Slab.fill: False -> True": "only the end of a process with page-locked memory could tell",
    "shard/cache:NodeShard.kept: self._stored.synchronize() -> pass": "there are no events on a CPU;"
    " tests/rehearse/test_order.py, which is not near, finds the races",
    "shard/hooks:OutputGradients.__call__: self._awaited.outputs.discard(ref(self)) -> pass": "the hooks go with their"
    " graph; only a forward inside a backward, after the unit's own, could tell",
    "shard/gather:UnitGather.release: self._complete() -> pass": "ranks in one process copy when they wait, so nothing"
    " writes into memory that is free again",
    "shard/gather:BucketGather.finish: now.early is not None -> now.early is None": "both have the values; only the"
    " count of the memory that is held would differ, for a moment",
    "shard/crossing:WeightCrossing.makes_host_wait: self._is_coded and self.may_make_host_wait ->"
    " self._is_coded or self.may_make_host_wait": "the host of a CPU waits for each transfer",
    "codec/lossless_triton:_read: first += _CHUNK -> pass": "no tile of the tests has more events than one chunk holds",
    "codec/lossless_triton:_write: tl.debug_barrier() -> pass": "the interpreter runs one program after another",
    "ragged/packing:agree_on_packing: sorted(ranks_or_self(cluster.flag_group).gather([cluster.shard_index, own])) ->"
    " list(ranks_or_self(cluster.flag_group).gather([cluster.shard_index, own]))": "the conversions of the tests make"
    " of each share what another rank would make of it",
    "shard/cache:_lock_pages_for_cuda: 0 -> 1": "another flag of CUDA, which locks the pages as well",
    "comm/watch:_Watch._look: _RARER * idle_s -> _RARER // idle_s": "it looks for proofs more often",
    "pipeline/stages:_time_s: synchronize(values) -> pass": "there is nothing to wait for on a CPU",
    "islands/elastic:ElasticExchange._waiting: self._agreements.look_for_end() -> pass": "the watcher looks as often,"
    " and a try ends with its peers: it ends later",
}
"""By the mutant's name: why the nearest tests do not show its change. It counts as one that survives."""
