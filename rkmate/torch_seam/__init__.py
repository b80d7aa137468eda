"""Everything in rkmate that is not torch's documented API, by subject: what a release of torch can break.

`versions` says which releases were tested, and holds one self test for each feature. `patches` replaces
functions of torch and of libraries while a model is captured.
"""

from rkmate.torch_seam import versions

if not versions.was_seen():
    versions.check(versions.NEEDED)
