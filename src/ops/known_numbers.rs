//! Numbers in tensors that an operator reads on the device, which the host knows and can replace between launches.

use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::memory::as_bytes;
use crate::runtime::{Stream, lock};
use crate::tensor::AnyTensor;

/// What a plan requires of the numbers of `N` tensors, and of all that replace them.
pub(crate) trait NumbersCheck<const N: usize>: PartialEq {
    /// Refuses numbers that lead elsewhere than the plan's call has room for.
    fn check(&self, numbers: &[Vec<i64>; N]) -> Result<()>;
}

/// What the host knows of the numbers in `N` tensors, some of which may be absent. Clones share it.
#[derive(Debug)]
pub(crate) struct KnownNumbers<C, const N: usize>(Arc<Mutex<Content<C, N>>>);

#[derive(Debug)]
struct Content<C, const N: usize> {
    numbers: [Vec<i64>; N],
    checks: Vec<C>,
    /// Whether an overwrite failed midway, so that nobody knows what the tensors hold.
    unknown: bool,
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
            true => Err(Error::invalid("sequences", "numbers that were overwritten in part", "numbers that are known")
                .fix("overwrite the sequences again")),
        }
    }
}

impl<C: NumbersCheck<N>, const N: usize> KnownNumbers<C, N> {
    /// The numbers that tensors were made of.
    pub(crate) fn new(numbers: [Vec<i64>; N]) -> Self {
        Self(Arc::new(Mutex::new(Content { numbers, checks: Vec::new(), unknown: false })))
    }

    /// Calls `read` with the numbers. Those that were overwritten in part are refused.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&[Vec<i64>; N]) -> R) -> Result<R> {
        Ok(read(lock(&self.0).known()?))
    }

    /// Checks the numbers for a plan, and remembers the check for those of a later [overwrite](Self::overwrite).
    pub(crate) fn require(&self, check: C) -> Result<()> {
        let mut content = lock(&self.0);
        check.check(content.known()?)?;
        if !content.checks.contains(&check) {
            content.checks.push(check);
        }
        Ok(())
    }

    /// Waits for a stream, then replaces the numbers in tensors of as many INT32, and waits for that. What a plan
    /// refuses is not replaced. Where writing itself fails, new plans refuse the numbers until they are overwritten again.
    /// `on_device` says how a tensor holds its numbers.
    pub(crate) fn overwrite(
        &self,
        stream: &Stream,
        tensors: [Option<&AnyTensor>; N],
        numbers: [Vec<i64>; N],
        on_device: impl Fn(&[i64]) -> Vec<i32>,
    ) -> Result<()> {
        // The content is not locked while the host waits.
        stream.synchronize()?;
        let mut content = lock(&self.0);
        let mut checks = content.checks.iter();
        checks.try_for_each(|check| check.check(&numbers)).map_err(for_earlier_plans)?;
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

/// A refusal of numbers that a plan, which may be gone, could not read.
fn for_earlier_plans(mut why: Error) -> Error {
    if let Error::Violation(violation) = &mut why {
        violation
            .fix
            .push_str("; numbers for other tensors than those of the plans so far are for sequences made anew");
    }
    why
}
