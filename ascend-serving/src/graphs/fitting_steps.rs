//! Which steps the captured sizes hold.

use ascend_attention::{Element, Violation};

use crate::batch::{AttentionMetadata, LayerMask, MaskedRequest};
use crate::rules;

use super::captured_group::CapturedGroup;
use super::graph_tensors::CapturedProgram;

impl CapturedGroup {
    /// Refuses a step of another pool or causality or with another mask, or whose sequences gave up blocks, or tokens
    /// that some layer shows. Outside of a step the answer on blocks is that of the moment.
    fn admits(&self, metadata: &AttentionMetadata) -> Result<(), Violation> {
        metadata.check_pool(&self.pool)?;
        metadata.check_blocks(&self.pool)?;
        metadata.check_causality(self.causality)?;
        let own = self.causality.map(LayerMask::from);
        let mut masks = self.alike.iter().map(|alike| &alike.mask);
        if let Some(first) = masks.clone().next()
            && !masks.clone().chain(&own).any(|mask| mask == metadata.mask())
        {
            let given = metadata.mask();
            return Err(rules::STEP_CAUSALITY.broken(format_args!("a step of {given}"), first));
        }
        masks.try_for_each(|mask| metadata.check_mask(mask))
    }

    /// Refuses a step with a request of more new tokens than were captured, or of fewer where the calls of a layer
    /// have as many rows for each request.
    fn admits_tokens<T: Element>(
        &self,
        metadata: &AttentionMetadata,
        programs: &[CapturedProgram<T>],
    ) -> Result<(), Violation> {
        let each = self.each.0;
        let mut alike = self.alike.iter().map(|alike| &alike.mask).zip(programs);
        let alike = alike.find(|(mask, program)| program.dummy_rows.is_none() || mask.named().is_some());
        let mut requests = metadata.masked_requests();
        let other = requests.find(|request| match (request.place, alike) {
            (_, Some(_)) => request.new != each,
            (Some(_), None) => request.new > each,
            (None, None) => false,
        });
        let Some(MaskedRequest { place, new, .. }) = other else {
            return Ok(());
        };
        Err(Violation::new(
            &rules::GRAPH_SIZE,
            match place {
                Some(request) => format!("{new} new tokens of request {request}"),
                None => format!("a dummy request of {new} tokens"),
            },
            match alike {
                Some((LayerMask::Named(mask), _)) => {
                    format!("{each} a request, as was captured with the named mask {:?}", mask.name())
                }
                Some((_, program)) => {
                    format!("{each} a request, as was captured with the backend `{}`", program.recorded.backend.name())
                }
                None => format!("at most {each} a request"),
            },
            match alike {
                Some(_) => "compute the step without a graph: the captured calls have as many rows for each request",
                None => "compute the step without a graph, or capture with `GraphLimits::tokens_each`",
            },
        ))
    }

    /// Refuses a step that has more keys or blocks than were declared once it is padded to `rows` rows, or dummies of
    /// more rows than the captured calls take.
    fn within_limits<T: Element>(
        &self,
        metadata: &AttentionMetadata,
        rows: usize,
        programs: &[CapturedProgram<T>],
    ) -> Result<(), Violation> {
        let requests = self.requests(rows);
        let dummies = metadata.missing(requests, rows)?;
        let longest = dummies.clone().max().unwrap_or(0);
        let keys = metadata.kv_lengths().lengths().iter().copied();
        // A dummy request has as many keys as tokens, in blocks.
        let keys: Vec<usize> = keys.chain(dummies).collect();
        self.limits.admits(&keys)?;
        self.admits_dummies((longest, requests), programs)
    }

    /// The refusal of a step that cannot be padded to any size, the largest of `most` rows.
    fn too_large(&self, metadata: &AttentionMetadata, most: usize) -> Violation {
        let tokens = metadata.tokens();
        let most_requests = self.requests(most);
        match self.each.0 {
            1 => rules::GRAPH_SIZE.broken(format_args!("{tokens} tokens"), format_args!("at most {most}")),
            each => Violation::new(
                &rules::GRAPH_SIZE,
                format_args!("{tokens} tokens of {} requests", metadata.table().requests()),
                format_args!(
                    "{most_requests} requests of {each} tokens each, or fewer requests of up to {each} tokens"
                ),
                "compute the step without a graph, or capture one request more than ever run",
            ),
        }
    }

    /// Refuses dummy requests of a size whose longest has more rows than the calls of a layer take.
    fn admits_dummies<T: Element>(
        &self,
        (longest, requests): (usize, usize),
        programs: &[CapturedProgram<T>],
    ) -> Result<(), Violation> {
        let taken = |program: &CapturedProgram<T>| program.dummy_rows.unwrap_or(self.each.0);
        match programs.iter().find(|program| longest > taken(program)) {
            None => Ok(()),
            Some(program) => Err(rules::GRAPH_SIZE.broken(
                format_args!("a dummy request of {longest} tokens, in the size of {requests} requests"),
                format_args!(
                    "at most {} a dummy, as was captured with the backend `{}`",
                    taken(program),
                    program.recorded.backend.name()
                ),
            )),
        }
    }
}

/// The query rows of the smallest captured size that a step can be padded to, or why it cannot be replayed: because it
/// is of another cache or mask, or larger than every size, or has more tokens, keys or blocks than were declared.
///
/// The step has a part for each group. `programs` returns what computes the layers of a part in the size of these rows.
pub(crate) fn fitting_rows<'p, T: Element>(
    sizes: &[usize],
    parts: &[(&CapturedGroup, &AttentionMetadata)],
    programs: impl Fn(usize, usize) -> &'p [CapturedProgram<T>],
) -> Result<usize, Violation> {
    let largest = sizes.last().copied().unwrap_or(0);
    for (at, (group, metadata)) in parts.iter().enumerate() {
        group.admits(metadata)?;
        metadata.check_requests()?;
        group.admits_tokens(metadata, programs(largest, at))?;
    }
    let mut refused = None;
    for &rows in sizes {
        let can_be_padded = |(group, metadata): &(&CapturedGroup, &AttentionMetadata)| {
            metadata.can_be_padded(group.requests(rows), rows)
        };
        if !parts.iter().all(can_be_padded) {
            continue;
        }
        let mut parts = parts.iter().enumerate();
        match parts.try_for_each(|(at, (group, metadata))| group.within_limits(metadata, rows, programs(rows, at))) {
            Ok(()) => return Ok(rows),
            Err(why) => refused = refused.or(Some(why)),
        }
    }
    let too_large = parts.first().map(|(group, metadata)| group.too_large(metadata, largest));
    match refused.or(too_large) {
        Some(why) => Err(why),
        // A step of no group has no tokens.
        None => Ok(largest),
    }
}
