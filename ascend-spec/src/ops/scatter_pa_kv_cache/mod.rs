//! ScatterPaKvCache: writes new keys and values into a paged cache, each token into the slot that a mapping names.
//!
//! Slot `s` is row `s % block_size` of block `s / block_size`. [`ScatterCall`] checks shapes and attributes;
//! [`slot_faults`] checks the contents of the slot mapping.

mod problem;
pub mod rules;
mod slots;

pub use problem::{Pieces, ScatterProblem};
pub(crate) use slots::numbered_slot_faults;
pub use slots::{SlotFault, slot_faults};

/// Name of [`ScatterCall::cache_mode`] for caches `[blocks, block size, N, D]`.
pub const NORM: &str = "Norm";
/// Name of [`ScatterCall::cache_mode`] for caches in the NZ order.
pub const PA_NZ: &str = "PA_NZ";

use crate::Cann::V8_1;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, TensorDesc};

declare_operator! {
    /// Source: aclnnScatterPaKvCache, parameter table.
    scatter_pa_kv_cache_arguments, "ScatterPaKvCache", #[derive(Copy)] ScatterCall<'a>;
    1 { key: tensor, Key, "key", "New keys, `[tokens, N, D]`." }
    1 { key_cache: inout, KeyCache, "keyCacheRef",
        "Cache of the keys, written in place: `[blocks, block size, N, D]`; with `PA_NZ` `[blocks, N * D / c, \
         block size, c]` or `[blocks, N, D / c, block size, c]`, where `c` elements are 32 bytes." }
    1 { slot_mapping: tensor, SlotMapping, "slotMapping", "The slot of each token." }
    1 { value: tensor, Value, "value", "New values, `[tokens, N, Dv]`; none to write keys alone." }
    1 { value_cache: inout, ValueCache, "valueCacheRef", "Cache of the values, as that of the keys." }
    1 { compress_lens: tensor, CompressLens, "compressLens", "For the compressed modes." }
    1 { compress_seq_offset: tensor, CompressSeqOffset, "compressSeqOffset", "For the compressed modes." }
    1 { seq_lens: tensor, SeqLens, "seqLens", "For the compressed modes." }
    1 { cache_mode: optional_text, CacheMode, "cacheMode",
        "Order of the caches: `Norm` (also null) or `PA_NZ`." }
    1 { scatter_mode: optional_text, ScatterMode, "scatterMode",
        "How tokens are chosen: `None` (also null), `Alibi`, `Rope`, `Omni` or `Nct`." }
    1 { strides: int_list, Strides, "strides", "Steps of keys and values; null means 1 and 1." }
    1 { offsets: int_list, Offsets, "offsets", "First elements of keys and values; null means 0 and 0." }
}

versions! {
    /// The version of ScatterPaKvCache.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnScatterPaKvCache", "after 8.1").on_a2_a3(V8_1).on_ascend950(V8_1),
    }
}

described_by! { ScatterPaKvCache, rules::RULES }

impl CallContract for ScatterPaKvCache {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target.soc }

    fn imply_outputs(_: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {}

    contents_checked_for! { target.soc, |_, problem, integers| {
        let mut wrong = None;
        let slots = integers(Parameter::SlotMapping);
        slot_faults(&slots, problem.slots(), &mut |fault| {
            wrong = wrong.or(Some(fault).filter(|fault| fault.rule().overruns));
        });
        wrong.map_or(Ok(()), |fault| Err(fault.violation()))
    } }
}
