//! Scattering new rows of keys and values into a paged cache.

use ascend_spec::ops::scatter_pa_kv_cache::{Parameter, Pieces, ScatterProblem};

/// Finds the address of a tensor's first element.
type Base<'a> = &'a dyn Fn(Parameter) -> *mut u8;

/// Writes each token's rows into its KV slot, in the order of the tokens. Slots that the cache does not have are
/// skipped.
///
/// # Safety
///
/// Each address that `base` returns is valid for the bytes that [`ScatterProblem::touches`] reports for its tensor:
/// for reads, and those of the caches for writes; the caches overlap nothing else.
pub(crate) unsafe fn run(problem: &ScatterProblem, slots: &[i64], base: Base<'_>) {
    let pairs = [
        (Some(problem.key), Parameter::Key, Parameter::KeyCache),
        (problem.value, Parameter::Value, Parameter::ValueCache),
    ];
    for (pieces, rows, cache) in pairs {
        let Some(pieces) = pieces else { continue };
        for (token, &slot) in slots.iter().enumerate().take(problem.tokens) {
            let inside = u64::try_from(slot).is_ok_and(|slot| slot < problem.slots());
            if inside {
                // SAFETY: the caller keeps this contract; the slot is inside and the token one of the call's.
                unsafe {
                    write(
                        problem,
                        &pieces,
                        base(rows),
                        token,
                        base(cache),
                        slot as usize,
                    )
                };
            }
        }
    }
}

/// Writes the row of one token.
///
/// # Safety
///
/// As for [`run`]; the token is one of the call's, the slot one of the cache's.
unsafe fn write(
    problem: &ScatterProblem,
    pieces: &Pieces,
    rows: *const u8,
    token: usize,
    cache: *mut u8,
    slot: usize,
) {
    for piece in 0..pieces.count {
        let from = token * pieces.row_bytes() + piece * pieces.bytes;
        let to = problem.place(pieces, slot, piece);
        // SAFETY: both pieces lie in their tensors, as token and slot do; the tensors are apart.
        unsafe {
            std::ptr::copy_nonoverlapping(rows.add(from), cache.add(to), pieces.bytes);
        }
    }
}
