//! Outputs that share memory with another tensor.

use crate::fault::Fault;
use crate::operator::{Access, Addresses, Operator};
use crate::status::AICORE_EXCEPTION;
use smallvec::SmallVec;

/// An output that shares bytes with another tensor of the same launch.
fn overlap(accesses: &[Access]) -> Option<(&Access, &Access)> {
    let end = |access: &Access| access.address.saturating_add(access.bytes as usize);
    accesses.iter().enumerate().find_map(|(i, one)| {
        let other = accesses.iter().enumerate().find(|&(j, other)| {
            i != j && one.write && one.address < end(other) && other.address < end(one)
        });
        other.map(|(_, other)| (one, other))
    })
}

/// Returns a device fault if a launch would write memory that is also part of another of its tensors.
pub(super) fn refuse_overlap(op: &dyn Operator, at: &Addresses) -> Result<(), Fault> {
    let mut accesses: SmallVec<[Access; 16]> = SmallVec::new();
    op.accesses(at, &mut |access| {
        if access.bytes > 0 {
            accesses.push(access);
        }
    });
    match overlap(&accesses) {
        None => Ok(()),
        Some((output, other)) => Err(Fault {
            code: AICORE_EXCEPTION,
            message: format!(
                "{}: {} at {:#x} and {} at {:#x} overlap; the output cannot share memory with another tensor",
                op.name(),
                output.what,
                output.address,
                other.what,
                other.address
            ),
        }),
    }
}
