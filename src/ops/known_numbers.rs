//! Numbers in tensors that an operator reads on the device, which the host knows and can replace between launches.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::memory::{Element, as_bytes};
use crate::runtime::{ReplayCheck, Stream, lock};
use crate::tensor::AnyTensor;

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

/// What the host knows of the numbers in `N` tensors, some of which may be absent. Clones share it.
#[derive(Debug)]
pub(crate) struct KnownNumbers<C, const N: usize>(Arc<Mutex<Content<C, N>>>);

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
    numbers: KnownNumbers<C, N>,
    _check: Arc<C>,
}

impl<C: NumbersCheck<N>, const N: usize> ReplayCheck for KnownNumbers<C, N> {
    /// Refuses numbers that were overwritten in part.
    fn admits_replay(&self) -> Result<()> {
        self.read(|_| ())
    }
}

impl<C: NumbersCheck<N>, const N: usize> ReplayCheck for RequiredNumbers<C, N> {
    fn admits_replay(&self) -> Result<()> {
        self.numbers.admits_replay()
    }
}

impl<C, const N: usize> Clone for KnownNumbers<C, N> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
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

impl<C: NumbersCheck<N>, const N: usize> KnownNumbers<C, N> {
    /// The numbers that the tensors of an argument were made of.
    pub(crate) fn new(argument: &'static str, numbers: [Vec<i64>; N]) -> Self {
        Self(Arc::new(Mutex::new(Content { argument, numbers, checks: Vec::new(), unknown: false })))
    }

    /// Calls `read` with the numbers. Those that were overwritten in part are refused.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&[Vec<i64>; N]) -> R) -> Result<R> {
        Ok(read(lock(&self.0).known()?))
    }

    /// Checks the numbers for a plan, and those of each later [overwrite](Self::overwrite) for as long as what it
    /// returns is kept: by the plan, whose launches ask whether the numbers are known, and by graphs of them.
    pub(crate) fn require(&self, check: C) -> Result<Arc<dyn ReplayCheck>> {
        let mut content = lock(&self.0);
        check.check(content.known()?)?;
        let known = content.checks.iter().find(|known| ***known == check).map(Arc::clone);
        let check = known.unwrap_or_else(|| {
            let check = Arc::new(check);
            content.checks.push(Arc::clone(&check));
            check
        });
        Ok(Arc::new(RequiredNumbers { numbers: self.clone(), _check: check }))
    }

    /// The content, where numbers that are to replace the present ones pass every check. Where those of plans that are
    /// gone refuse them, or are many, waits for the device, on which launches of these may be queued, and drops them.
    fn replaceable(&self, stream: &Stream, numbers: &[Vec<i64>; N]) -> Result<MutexGuard<'_, Content<C, N>>> {
        loop {
            let mut content = lock(&self.0);
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
            content = lock(&self.0);
            content.checks.retain(|check| !(is_gone(check) && gone.contains(&Arc::as_ptr(check))));
        }
    }

    /// Waits for a stream, then replaces the numbers in tensors of as many elements, and waits for that. What a plan
    /// refuses is not replaced. Where writing itself fails, plans, launches and replays refuse the numbers until they
    /// are overwritten again. `on_device` says how a tensor holds its numbers.
    pub(crate) fn overwrite<E: Element>(
        &self,
        stream: &Stream,
        tensors: [Option<&AnyTensor>; N],
        numbers: [Vec<i64>; N],
        on_device: impl Fn(&[i64]) -> Vec<E>,
    ) -> Result<()> {
        // The content is not locked while the host waits.
        stream.synchronize()?;
        let mut content = self.replaceable(stream, &numbers)?;
        content.unknown = true;
        for (tensor, numbers) in tensors.into_iter().zip(&numbers) {
            if let Some(tensor) = tensor {
                tensor.renew(stream, as_bytes(&on_device(numbers)))?;
            }
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
