//! The keys that the call of a case file sees.

use std::path::Path;

use ascend_attention::Machine;
use ascend_attention::case::{Case, Parameter};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::attention_problem::Padding;
use ascend_attention::spec::{Soc, Target};

use super::formula::Formula;
use super::trouble;
use crate::Stop;

/// Title and formula of one sequence of a case, and how many it has.
pub(super) fn read(file: &Path, sequence: usize) -> Result<(String, Formula, usize), Stop> {
    let case = Case::read(file).and_then(Case::attention);
    let case = case.map_err(|error| trouble(file, &error))?;
    let description = case.describe();
    let call = description.call();
    let otherwise = Target::new(Soc::AtlasA2, Machine::DEFAULT_CANN);
    let checked = case.checked(&call, otherwise);
    let checked = checked.map_err(|error| trouble(file, &error))?;
    let problem = &checked.problem;
    if sequence >= problem.batch {
        return Err(trouble(
            file,
            &format_args!("--sequence {sequence}: the call has {}, counted from 0", problem.batch),
        ));
    }
    let geometry = problem.geometry(sequence);
    let (rows, keys) = (geometry.q_len(), geometry.kv_len());
    let title = format!(
        "{}, sequence {sequence} of {}: mode {}, Sq {rows}, Skv {keys}",
        case.name.escape_debug(),
        problem.batch,
        problem.mode
    );
    let tensor = case.tensor(Parameter::AttenMask);
    let read = problem.sequences(Padding::default()).nth(sequence);
    let formula = match (read.and_then(|(_, at)| at), tensor) {
        (Some(at), Some(tensor)) => {
            let bytes = tensor.bytes();
            let visible = |i: usize, j: usize| {
                let byte = at.element(i, j).map(|place| {
                    let place = usize::try_from(place).ok();
                    place.and_then(|place| bytes.get(place))
                });
                byte.is_none_or(|byte| byte.is_some_and(|&byte| byte == 0))
            };
            let size = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
            let mask = HostMask::from_fn(size(rows), size(keys), MaskForm::INT8, visible)
                .map_err(|error| trouble(file, &error))?;
            Formula::masked(geometry, problem.mode, mask)
        }
        _ => {
            let tokens = (call.pre_tokens, call.next_tokens);
            Formula::geometry(problem.mode, tokens, geometry)
        }
    };
    Ok((title, formula, problem.batch))
}
