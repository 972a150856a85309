//! A random call, run by the kernels and by the oracle.

use super::calls::Call;
use super::data::Data;
use crate::kernel::simd::Level;
use ascend_spec::DType;
use ascend_spec::attention_problem::AttentionProblem;

/// What the kernels and the oracle do with a call.
pub(super) trait Computed {
    /// Calls `work` with the call and its data; the tensors of the query's type have elements of type `held`.
    fn with<R>(
        &self,
        held: Option<DType>,
        work: impl FnOnce(&AttentionProblem<'_>, &mut Data) -> R,
    ) -> R;

    /// Runs the call and compares all of output and log-sum-exp with the oracle.
    fn check(&self, held: Option<DType>, level: Level) -> Result<(), String>;
}

impl Computed for Call {
    fn with<R>(
        &self,
        held: Option<DType>,
        work: impl FnOnce(&AttentionProblem<'_>, &mut Data) -> R,
    ) -> R {
        let call = self.describe();
        let checked = match call.check(self.version, self.target) {
            Ok(checked) => checked,
            Err(refusal) => panic!("{refusal}\n{self:?}"),
        };
        let held = held.unwrap_or(checked.problem.dtype());
        let mut data = Data::new(&checked, held, self.seed);
        for (argument, bytes) in &self.contents {
            data.put(*argument, bytes.iter().copied());
        }
        work(&checked.problem, &mut data)
    }

    fn check(&self, held: Option<DType>, level: Level) -> Result<(), String> {
        self.with(held, |problem, data| {
            let want = data.oracle(problem);
            data.run(problem, level);
            data.compare(problem, &want)
        })
    }
}
