//! The operator's checkers; which of them judges a call is the root of most differences between releases.

/// The parts of the operator that check calls, each with rules of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Checker {
    /// The path of several query rows a sequence.
    Prefill,
    /// The path of one query row a sequence, and of the absorbed form.
    Decode,
    /// The path of packed rows without rotary parts, which checks little.
    SplitFuse,
    /// One checker for all calls of half precision, and for every call on Ascend 950.
    Unified,
}

impl Checker {
    /// Which calls go to which checker, for each group of releases: the release or product, then the calls of the
    /// unified checker, of the split-fuse path, and of the decode and prefill path.
    pub const CALLS: [[&'static str; 4]; 4] = [
        ["8.1", "none", "none", "every call"],
        [
            "8.5",
            "half precision with head dimensions of 64, 128 (rotary parts of 64 or none), 192 over 128, or absorbed, without \
             bias, padding, prefix or output quantisation; NZ caches and reordered layouts",
            "some packed rows without rotary parts",
            "the rest",
        ],
        [
            "9.0, 9.1",
            "half precision",
            "most packed rows without rotary parts",
            "quantised calls; single rows of 256, or of 80 with a prefix, with as many key heads as query heads",
        ],
        ["Ascend 950", "every call", "none", "none"],
    ];
}
