//! What a launch touches, held against the call's tensors.

use ascend_spec::operator::{Argument, ArgumentList};
use ascend_spec::{TensorDesc, Unsupported};
use std::ops::Range;

/// Refuses a call whose launch would touch bytes outside of its tensors. The operators take some calls without work, or with
/// sizes that they do not compare, of which the arguments say more than the tensors have.
pub(super) fn refuse_beyond_tensors<A: ArgumentList<Tensor = TensorDesc>>(
    arguments: &A,
    touches: &[(Argument<A::Parameter>, Range<u64>)],
) -> Result<(), Unsupported> {
    let inside = |(argument, touched): &(Argument<A::Parameter>, Range<u64>)| {
        let desc = arguments.tensor(*argument);
        let all = desc.and_then(TensorDesc::byte_range);
        touched.is_empty()
            || all.is_some_and(|all| all.start <= touched.start && touched.end <= all.end)
    };
    match touches.iter().all(inside) {
        true => Ok(()),
        false => Err(Unsupported::new(
            "arguments that say more rows, heads or elements than the tensors have, which the operator does not compare",
        )),
    }
}
