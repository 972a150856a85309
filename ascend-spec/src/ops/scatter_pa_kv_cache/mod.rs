//! ScatterPaKvCache: writes new keys and values into a paged cache, each token into the slot that a mapping names.
//!
//! Slot `s` is row `s % block_size` of block `s / block_size`. [`ScatterCall`] checks shapes and attributes;
//! [`slot_faults`] checks the contents of the slot mapping.

mod arguments;
mod problem;
pub mod rules;
mod slots;

pub use arguments::{Argument, Arguments, Parameter, ScatterCall};
pub use problem::{Pieces, ScatterProblem};
pub(crate) use slots::numbered_slot_faults;
pub use slots::{SlotFault, slot_faults};

/// Name of [`ScatterCall::cache_mode`] for caches `[blocks, block size, N, D]`.
pub const NORM: &str = "Norm";
/// Name of [`ScatterCall::cache_mode`] for caches in the NZ order.
pub const PA_NZ: &str = "PA_NZ";

use crate::Cann::V8_1;
use crate::contract::{CallContract, contents_checked_for, described_by, each_lint};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, Target, TensorDesc, Violation};

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

    type Arguments = Arguments<TensorDesc>;

    fn check(
        arguments: &Self::Arguments,
        _: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        let call = arguments.call();
        call.check(target.soc)?;
        each_lint(|allowed| call.lint(allowed), report);
        Ok(())
    }

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
