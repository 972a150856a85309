//! Communicators of some ranks of another communicator.

use super::communicator::{Communicator, Split};
use super::settings::Settings;
use crate::status::{HCCL_NOT_SUPPORTED, HCCL_PARA, Outcome, failure};
use std::sync::Arc;

/// What a rank asks for.
#[derive(Debug)]
pub(crate) struct SplitRequest {
    /// What tells the communicators of one parent apart.
    pub number: u64,
    /// The ranks of the parent, in rising order.
    pub ranks: Vec<u32>,
    /// The index of the caller among them.
    pub rank: u32,
}

impl Communicator {
    /// `HcclCreateSubCommConfig` of a rank. Nobody is waited for.
    pub(super) fn split(
        &self,
        name: &str,
        parent_rank: usize,
        request: &SplitRequest,
        settings: &Settings,
    ) -> Outcome<Arc<Communicator>> {
        let SplitRequest { number, ranks, rank } = request;
        if self.is_split {
            let own = &self.name;
            return Err(failure!(
                HCCL_NOT_SUPPORTED,
                "{name}: comm: given {own}, which is itself of some ranks of another; allowed: one of all ranks"
            ));
        }
        let exist = ranks.iter().all(|rank| (*rank as usize) < self.size);
        if !exist || ranks.is_empty() || !ranks.is_sorted_by(|one, two| one < two) {
            let last = self.size - 1;
            return Err(failure!(
                HCCL_PARA,
                "{name}: rankIds: given {ranks:?}, allowed: ranks from 0 to {last} in rising order, each once"
            ));
        }
        let index = *rank as usize;
        if ranks.get(index).is_none_or(|rank| *rank as usize != parent_rank) {
            let allowed = match ranks.iter().position(|rank| *rank as usize == parent_rank) {
                Some(own) => format!("{own}, the index of rank {parent_rank} in rankIds"),
                None => format!("none: rank {parent_rank} is not in rankIds, and gives null and 0xFFFFFFFF"),
            };
            return Err(failure!(HCCL_PARA, "{name}: subCommRankId: given {rank}, allowed: {allowed}"));
        }
        let mut state = self.state.lock();
        if let Some(why) = state.gone(parent_rank as u32) {
            return Err(failure!(HCCL_PARA, "{name}: comm: rank {parent_rank} of {}: {why}", self.name));
        }
        // A number is free again when its communicator has ended on all ranks.
        let known = state.splits.get(number).is_some_and(|split| split.communicator.strong_count() > 0);
        if !known {
            let mut made = settings.communicator(ranks.len(), || format!("{}_sub_{number}", self.name));
            made.is_split = true;
            made.listener = self.listener.clone();
            let is_here = |(_, rank): &(usize, &u32)| self.local_ranks.contains(&(**rank as usize));
            made.local_ranks = ranks.iter().enumerate().filter(is_here).map(|(index, _)| index).collect();
            let made = Arc::new(made);
            let taken = vec![false; ranks.len()];
            let communicator = Arc::downgrade(&made);
            let mut split = Split { ranks: ranks.clone(), communicator, kept: Some(made), taken };
            for rank in ranks {
                if let Some(why) = state.gone(*rank) {
                    split.mark_gone(*rank as usize, why);
                }
            }
            state.splits.insert(*number, split);
        }
        let split = state.splits.get_mut(number).filter(|split| split.ranks == *ranks);
        let Some(split) = split else {
            let other = state.splits.get(number).map(|split| split.ranks.clone()).unwrap_or_default();
            return Err(failure!(
                HCCL_PARA,
                "{name}: rankIds: given {ranks:?}, and {other:?} by a rank that came before for subCommId {number}; \
                 give all ranks the same, or another subCommId"
            ));
        };
        let made = match (split.taken.get_mut(index), split.communicator.upgrade()) {
            (Some(taken @ false), Some(made)) => {
                *taken = true;
                made
            }
            _ => {
                return Err(failure!(
                    HCCL_PARA,
                    "{name}: subCommId: given {number}, of which rank {parent_rank} has its part already; give \
                     another one, or destroy that communicator on all ranks before"
                ));
            }
        };
        split.release();
        Ok(made)
    }
}

impl Split {
    /// Notes that a rank of the parent is gone: a part that it has not taken will never be.
    pub(super) fn mark_gone(&mut self, parent_rank: usize, why: &'static str) {
        let Some(index) = self.ranks.iter().position(|rank| *rank as usize == parent_rank) else { return };
        if let (Some(taken @ false), Some(communicator)) = (self.taken.get_mut(index), self.communicator.upgrade()) {
            *taken = true;
            communicator.mark_gone(index, why);
            self.release();
        }
    }

    /// Leaves the communicator to those who have taken their parts, once no other rank can come.
    fn release(&mut self) {
        if self.taken.iter().all(|taken| *taken) {
            self.kept = None;
        }
    }
}
