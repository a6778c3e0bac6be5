"""Random module trees, used at random, sharded against unsharded: the engine must be a drop-in.

`case.py` has the words of a case, `modules.py` builds its model, `strategies.py` draws cases with hypothesis, `play.py`
runs the steps of a case, on a rank or as the oracle of all ranks, `compare.py` compares the two, and `pool.py` plays
cases on ranks in this process.

[Note: A case]
A case is plain data: a tree of modules, the units and their options, and the steps to take. Its `repr` is the whole
reproducer: `pool.check(case)` runs it again, and hypothesis shrinks it. Dtypes and policies are named by
strings.

[Note: What no case does]
Some uses have no defined result, for FSDP2 either, and are not drawn: ranks whose graphs differ by more than the
parameters inside a unit (their collectives would not match), a last micro-batch without a backward, and clipping by a
norm that includes parameters outside of units, as their gradients differ from rank to rank.
"""
