//! A call as a message between processes.

use super::call::{Call, Kind, Segment};
use super::communicator::Arrival;
use super::wire::{Message, Verb};
use ascend_spec::collective::{Collective, Reduction, dtype_of_hccl, hccl_number};
use std::sync::Arc;

/// The operators that only the ranks they name call.
const POINT_TO_POINT: [&str; 4] = ["HcclSend", "HcclRecv", "HcclBatchSendRecv", "HcclGroupEnd"];

/// Every kind of call; the place is its number.
fn kinds() -> impl Iterator<Item = Kind> {
    let collectives = Collective::ALL.iter().map(|collective| Kind::Collective(*collective));
    collectives.chain(POINT_TO_POINT.map(Kind::PointToPoint))
}

/// The numbers of a message, read one after the other.
struct Numbers<'a>(std::slice::Iter<'a, u64>);

impl Numbers<'_> {
    fn next(&mut self) -> Option<u64> {
        self.0.next().copied()
    }

    fn index(&mut self) -> Option<usize> {
        usize::try_from(self.next()?).ok()
    }

    /// A number that may be missing: it comes behind its count.
    fn optional(&mut self) -> Option<Option<u64>> {
        match self.next()? {
            0 => Some(None),
            1 => self.next().map(Some),
            _ => None,
        }
    }

    /// Items behind their count.
    fn list<T>(&mut self, item: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.index().filter(|count| *count <= self.0.len())?;
        (0..count).map(|_| item(self)).collect()
    }
}

/// The segments of a call without their addresses, which are of another process.
fn numbers_of(segments: &[Segment]) -> impl Iterator<Item = u64> {
    let each = segments.iter().flat_map(|segment| {
        let dtype = hccl_number(segment.dtype).map_or(u64::MAX, u64::from);
        [segment.peer as u64, segment.bytes as u64, dtype]
    });
    std::iter::once(segments.len() as u64).chain(each)
}

fn segment(numbers: &mut Numbers<'_>, size: usize) -> Option<Segment> {
    let peer = numbers.index().filter(|peer| *peer < size)?;
    let bytes = numbers.index()?;
    let dtype = dtype_of_hccl(u32::try_from(numbers.next()?).ok()?)?;
    Some(Segment { peer, address: 0, bytes, dtype })
}

/// A call that comes to the communicator's process.
pub(super) fn message_of(arrival: &Arrival) -> Message {
    let Arrival { call, payloads } = arrival;
    let optional = |value: Option<u64>| std::iter::once(u64::from(value.is_some())).chain(value);
    let kind = kinds().position(|kind| kind == call.kind).unwrap_or(usize::MAX);
    let mut numbers = vec![kind as u64, hccl_number(call.dtype).map_or(u64::MAX, u64::from)];
    numbers.extend(optional(call.reduction.map(|reduction| u64::from(reduction.hccl_number()))));
    numbers.extend(optional(call.root.map(u64::from)));
    numbers.extend(optional(call.count));
    numbers.push(call.lists.len() as u64);
    numbers.extend(&call.lists);
    numbers.extend(numbers_of(&call.sends).chain(numbers_of(&call.receives)));
    Message::new(Verb::Call, numbers, payloads.clone())
}

/// The call that a message of a rank is, if it is one.
pub(super) fn arrival_of(message: Message, rank: usize, size: usize) -> Option<Arrival> {
    let mut numbers = Numbers(message.numbers.iter());
    let kind = kinds().nth(numbers.index()?)?;
    let dtype = dtype_of_hccl(u32::try_from(numbers.next()?).ok()?)?;
    let reduction = match numbers.optional()? {
        None => None,
        Some(number) => Some(*Reduction::ALL.get(usize::try_from(number).ok()?)?),
    };
    let root = match numbers.optional()? {
        None => None,
        Some(root) => Some(u32::try_from(root).ok()?),
    };
    let count = numbers.optional()?;
    let lists = numbers.list(Numbers::next)?;
    let sends = numbers.list(|numbers| segment(numbers, size))?;
    let receives = numbers.list(|numbers| segment(numbers, size))?;
    let lengths = sends.iter().map(|segment| segment.bytes);
    if numbers.next().is_some() || !lengths.eq(message.payloads.iter().map(|payload| payload.len())) {
        return None;
    }
    let call = Arc::new(Call { rank, kind, dtype, reduction, root, count, lists, sends, receives });
    Some(Arrival { call, payloads: message.payloads })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_spec::DType;

    fn drawn() -> Arrival {
        let segment = |peer, bytes| Segment { peer, address: 0, bytes, dtype: DType::Float };
        let call = Call {
            rank: 1,
            kind: Kind::Collective(Collective::AlltoAllV),
            dtype: DType::Float,
            reduction: Some(Reduction::Max),
            root: Some(2),
            count: Some(7),
            lists: vec![1, 2, 3],
            sends: vec![segment(0, 4), segment(1, 8), segment(2, 0)],
            receives: vec![segment(2, 12)],
        };
        let payloads = vec![vec![1; 4].into(), vec![2; 8].into(), vec![].into()];
        Arrival { call: Arc::new(call), payloads }
    }

    #[test]
    fn a_call_comes_as_it_was_sent_and_nothing_else_is_a_call() {
        let sent = drawn();
        let came = arrival_of(message_of(&sent), 1, 3).unwrap();
        assert_eq!(came.call.difference(&sent.call), None);
        assert_eq!((&came.call.sends, &came.call.receives), (&sent.call.sends, &sent.call.receives));
        assert_eq!((&came.call.lists, came.call.count, came.call.root), (&sent.call.lists, Some(7), Some(2)));
        assert_eq!(came.payloads, sent.payloads);
        // Of fewer ranks; without its last number; with one too many; with another length of a payload.
        assert!(arrival_of(message_of(&sent), 1, 2).is_none());
        let whole = message_of(&sent).numbers;
        for len in 0..whole.len() {
            let cut = Message::new(Verb::Call, whole[..len].to_vec(), sent.payloads.clone());
            assert!(arrival_of(cut, 1, 3).is_none(), "{len}");
        }
        let long = Message::new(Verb::Call, [&whole[..], &[0]].concat(), sent.payloads.clone());
        assert!(arrival_of(long, 1, 3).is_none());
        let short = Message::new(Verb::Call, whole.clone(), vec![vec![1; 3].into(), vec![2; 8].into(), vec![].into()]);
        assert!(arrival_of(short, 1, 3).is_none());
        for at in 0..whole.len() {
            for value in [u64::MAX, 1 << 40, 255] {
                let mut numbers = whole.clone();
                numbers[at] = value;
                // It is another call or none, and takes no memory that the message does not have.
                let _ = arrival_of(Message::new(Verb::Call, numbers, sent.payloads.clone()), 1, 3);
            }
        }
    }
}
