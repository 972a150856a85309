//! Compares the bytes that a launch touches with the call's tensors.

use super::declared::DeclaredOperator;
use ascend_spec::operator::ArgumentList;
use ascend_spec::{TensorDesc, Violation};

/// Refuses a call whose launch would touch bytes outside of its tensors, unless a lint reports that it does. The
/// operators take some calls without work, or with sizes that they do not compare, whose arguments claim more than
/// the tensors have.
pub(super) fn refuse_beyond_tensors<O: DeclaredOperator>(op: &O) -> Result<(), Violation> {
    let mut inside = true;
    op.touches(&mut |argument, touched| {
        let desc = op.arguments().tensor(argument);
        let all = desc.and_then(TensorDesc::byte_range);
        inside &= touched.is_empty()
            || all.is_some_and(|all| all.start <= touched.start && touched.end <= all.end);
    });
    match inside || op.overruns() {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "arguments that say more rows, heads or elements than the tensors have, which the operator does not compare",
        )),
    }
}
