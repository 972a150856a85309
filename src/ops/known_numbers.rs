//! Numbers in tensors that an operator reads on the device, which the host knows and can replace between launches.

use std::array;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::memory::{Element, as_bytes};
use crate::runtime::{Context, ReplayCheck, Stream, lock};
use crate::tensor::{AnyTensor, Tensor};

/// What a plan requires of the numbers of `N` tensors, and of all that replace them.
pub(crate) trait NumbersCheck<const N: usize>: Debug + PartialEq + Send + Sync + 'static {
    /// Refuses numbers that lead elsewhere than the plan's call has room for.
    fn check(&self, numbers: &[Vec<i64>; N]) -> Result<()>;
}

/// For numbers that whoever replaces them checks, whatever plans there are.
impl<const N: usize> NumbersCheck<N> for () {
    fn check(&self, _: &[Vec<i64>; N]) -> Result<()> {
        Ok(())
    }
}

/// The numbers of `N` arguments: tensors that only [`overwrite`](Self::overwrite) writes to, and what the host knows of
/// them. An argument without numbers is not given. Clones share both.
#[derive(Debug)]
pub(crate) struct KnownNumbers<C, const N: usize, E: Element = i32> {
    tensors: [Tensor<E>; N],
    /// A number as its tensor holds it.
    on_device: fn(i64) -> E,
    content: Arc<Mutex<Content<C, N>>>,
}

#[derive(Debug)]
struct Content<C, const N: usize> {
    /// The argument that the numbers are.
    argument: &'static str,
    numbers: [Vec<i64>; N],
    /// Those of plans, and of graphs that have captured launches of them. Of those that are gone, launches may be
    /// queued yet.
    checks: Vec<Arc<C>>,
    /// Whether an overwrite failed midway, so that the contents of the tensors are unknown.
    unknown: bool,
}

/// Most checks of plans that are gone which numbers keep.
const MOST_GONE: usize = 64;

/// A check that holds for the numbers for as long as this is kept, by the plan that made it and by graphs that have
/// captured its launches, and until the launches that these have queued are over.
#[derive(Debug)]
struct RequiredNumbers<C, const N: usize> {
    content: Arc<Mutex<Content<C, N>>>,
    _check: Arc<C>,
}

impl<C: NumbersCheck<N>, const N: usize> ReplayCheck for Mutex<Content<C, N>> {
    /// Refuses numbers that were overwritten in part.
    fn admits_replay(&self) -> Result<()> {
        lock(self).known().map(drop)
    }
}

impl<C: NumbersCheck<N>, const N: usize> ReplayCheck for RequiredNumbers<C, N> {
    fn admits_replay(&self) -> Result<()> {
        self.content.admits_replay()
    }
}

impl<C, const N: usize, E: Element> Clone for KnownNumbers<C, N, E> {
    fn clone(&self) -> Self {
        Self { tensors: self.tensors.clone(), on_device: self.on_device, content: Arc::clone(&self.content) }
    }
}

impl<C, const N: usize> Content<C, N> {
    /// Refuses numbers that are not known.
    fn known(&self) -> Result<&[Vec<i64>; N]> {
        match self.unknown {
            false => Ok(&self.numbers),
            true => {
                Err(Error::invalid(self.argument, "numbers that were overwritten in part", "numbers that are known")
                    .fix("overwrite them again, by the `overwrite` that has failed"))
            }
        }
    }
}

impl<C: NumbersCheck<N>, const N: usize, E: Element> KnownNumbers<C, N, E> {
    /// Copies numbers, which refusals call `argument`, to the device.
    ///
    /// # Errors
    /// As for [`Stream::upload`].
    pub(crate) fn upload(
        stream: &Stream,
        argument: &'static str,
        numbers: [Vec<i64>; N],
        on_device: fn(i64) -> E,
    ) -> Result<Self> {
        let none = stream.upload(&[], [0])?;
        let mut tensors = array::from_fn(|_| none.clone());
        for (tensor, numbers) in tensors.iter_mut().zip(&numbers).filter(|(_, numbers)| !numbers.is_empty()) {
            let elements: Vec<E> = numbers.iter().copied().map(on_device).collect();
            *tensor = stream.upload(&elements, [elements.len()])?;
            tensor.freeze();
        }
        let content = Content { argument, numbers, checks: Vec::new(), unknown: false };
        Ok(Self { tensors, on_device, content: Arc::new(Mutex::new(content)) })
    }

    /// Views the tensor of one argument as a table, `[rows, columns]`.
    ///
    /// # Errors
    /// As for [`Tensor::reshape`].
    pub(crate) fn with_table(mut self, argument: usize, rows: usize) -> Result<Self> {
        let table = &mut self.tensors[argument];
        *table = table.reshape([rows, table.len() / rows.max(1)])?;
        Ok(self)
    }

    /// The tensor of an argument, without elements if it is not given.
    pub(crate) fn tensor(&self, argument: usize) -> &Tensor<E> {
        &self.tensors[argument]
    }

    /// The tensor of an argument, if it is given.
    pub(crate) fn given(&self, argument: usize) -> Option<&Tensor<E>> {
        Some(self.tensor(argument)).filter(|tensor| !tensor.is_empty())
    }

    /// The tensors of the arguments that are given, by these names.
    pub(crate) fn each<P>(&self, parameters: [P; N]) -> impl Iterator<Item = (P, &AnyTensor)> {
        let tensors = parameters.into_iter().zip(&self.tensors);
        tensors.filter(|(_, tensor)| !tensor.is_empty()).map(|(parameter, tensor)| (parameter, &**tensor))
    }

    /// Refuses tensors that are not on this device.
    pub(crate) fn on(&self, context: &Arc<Context>) -> Result<()> {
        let argument = lock(&self.content).argument;
        self.each([(); N]).try_for_each(|((), tensor)| tensor.on(argument, context))
    }

    /// The check that launches and replays pass: it refuses numbers that were overwritten in part.
    pub(crate) fn replay_check(&self) -> Arc<dyn ReplayCheck> {
        Arc::clone(&self.content) as _
    }

    /// Calls `read` with the numbers. Those that were overwritten in part are refused.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&[Vec<i64>; N]) -> R) -> Result<R> {
        Ok(read(lock(&self.content).known()?))
    }

    /// Checks the numbers for a plan, and those of each later [overwrite](Self::overwrite) for as long as what it
    /// returns is kept: by the plan, whose launches ask whether the numbers are known, and by graphs of them.
    pub(crate) fn require(&self, check: C) -> Result<Arc<dyn ReplayCheck>> {
        let mut content = lock(&self.content);
        check.check(content.known()?)?;
        let known = content.checks.iter().find(|known| ***known == check).map(Arc::clone);
        let check = known.unwrap_or_else(|| {
            let check = Arc::new(check);
            content.checks.push(Arc::clone(&check));
            check
        });
        Ok(Arc::new(RequiredNumbers { content: Arc::clone(&self.content), _check: check }))
    }

    /// The content, where numbers that are to replace the present ones pass every check. Where those of plans that are
    /// gone refuse them, or are many, waits for the device, on which launches of these may be queued, and drops them.
    fn replaceable(&self, stream: &Stream, numbers: &[Vec<i64>; N]) -> Result<MutexGuard<'_, Content<C, N>>> {
        loop {
            let mut content = lock(&self.content);
            let is_gone = |check: &Arc<C>| Arc::strong_count(check) == 1;
            let mut bound = content.checks.iter().filter(|check| !is_gone(check));
            bound.try_for_each(|check| check.check(numbers)).map_err(for_plans)?;
            let gone: Vec<_> = content.checks.iter().filter(|check| is_gone(check)).map(Arc::as_ptr).collect();
            let refuses = |check: &Arc<C>| is_gone(check) && check.check(numbers).is_err();
            if gone.len() <= MOST_GONE && !content.checks.iter().any(refuses) {
                return Ok(content);
            }
            // The content is not locked while the host waits.
            drop(content);
            stream.device().synchronize()?;
            content = lock(&self.content);
            content.checks.retain(|check| !(is_gone(check) && gone.contains(&Arc::as_ptr(check))));
        }
    }

    /// Waits for a stream of the same device, then replaces the numbers by as many for each argument, and waits for
    /// that. What a plan refuses is not replaced. Where writing itself fails, plans, launches and replays refuse the
    /// numbers until they are overwritten again.
    pub(crate) fn overwrite(&self, stream: &Stream, numbers: [Vec<i64>; N]) -> Result<()> {
        self.on(stream.context())?;
        // The content is not locked while the host waits.
        stream.synchronize()?;
        let mut content = self.replaceable(stream, &numbers)?;
        content.unknown = true;
        for (tensor, numbers) in self.tensors.iter().zip(&numbers).filter(|(tensor, _)| !tensor.is_empty()) {
            let elements: Vec<E> = numbers.iter().copied().map(self.on_device).collect();
            tensor.renew(stream, as_bytes(&elements))?;
        }
        content.numbers = numbers;
        content.unknown = false;
        Ok(())
    }
}

/// A refusal of numbers that a plan, or a captured launch of one that is gone, could not read.
fn for_plans(mut why: Error) -> Error {
    if let Error::Violation(violation) = &mut why {
        violation
            .fix
            .push_str("; numbers for other tensors than those of the plans and graphs are for sequences made anew");
    }
    why
}

/// A number that INT32 holds.
pub(crate) fn number(name: &'static str, number: usize) -> Result<i64> {
    let held = i32::try_from(number).map_err(|_| {
        Error::invalid(name, number, format_args!("0 to {}", i32::MAX)).fix("give numbers that INT32 counts")
    });
    held.map(i64::from)
}

/// Numbers that INT32 holds.
pub(crate) fn numbers(name: &'static str, all: impl IntoIterator<Item = usize>) -> Result<Vec<i64>> {
    all.into_iter().map(|each| number(name, each)).collect()
}

/// A number that INT32 holds, as the device has it.
pub(crate) fn narrow(number: i64) -> i32 {
    number as i32
}

/// Blocks of the longest row.
pub(crate) fn longest(rows: &[impl AsRef<[usize]>]) -> usize {
    rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0)
}

/// The block table of these rows, none of them longer than `columns`, row by row, with `padding` behind the blocks of
/// each.
pub(crate) fn padded_table(rows: &[impl AsRef<[usize]>], columns: usize, padding: i64) -> Result<Vec<i64>> {
    let mut table = Vec::new();
    if table.try_reserve_exact(rows.len().saturating_mul(columns)).is_err() {
        let given = format_args!("a table [{}, {columns}]", rows.len());
        return Err(Error::invalid("rows", given, "a table that fits in the host's memory")
            .fix("give sequences with long rows by themselves"));
    }
    for row in rows {
        let row = row.as_ref();
        for column in 0..columns {
            table.push(row.get(column).map_or(Ok(padding), |&block| number("rows", block))?);
        }
    }
    Ok(table)
}
