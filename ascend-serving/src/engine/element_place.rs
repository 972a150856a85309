//! Which request, token and head an element of a layer's tensor belongs to.

use crate::batch::AttentionMetadata;

/// The order of tokens and heads in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenOrder {
    /// `[tokens, N, D]`.
    TokensFirst,
    /// `[N, tokens, D]`.
    HeadsFirst,
}

/// The tokens and heads of a tensor without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TokenHeads {
    pub(super) order: TokenOrder,
    /// The index in the step of the first token.
    pub(super) first_token: usize,
    pub(super) tokens: usize,
    pub(super) heads: usize,
    /// Elements of a head.
    pub(super) head_size: usize,
}

/// The place of an element in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ElementPlace {
    pub(super) request: usize,
    /// The place of the token among the request's tokens in the step.
    pub(super) token: usize,
    pub(super) head: usize,
    /// The element of the head.
    pub(super) element: usize,
}

impl TokenHeads {
    /// The place of the element at an index, in a step whose [requests end](request_ends) there.
    pub(super) fn place(&self, at: usize, ends: &[usize]) -> ElementPlace {
        let row = at.checked_div(self.head_size).unwrap_or(0);
        let inner = match self.order {
            TokenOrder::TokensFirst => self.heads,
            TokenOrder::HeadsFirst => self.tokens,
        };
        let outer = row.checked_div(inner).unwrap_or(0);
        let inner = row.checked_rem(inner).unwrap_or(0);
        let (token, head) = match self.order {
            TokenOrder::TokensFirst => (outer, inner),
            TokenOrder::HeadsFirst => (inner, outer),
        };
        let of_step = self.first_token + token;
        let request = ends.partition_point(|end| *end <= of_step);
        let before = request.checked_sub(1).and_then(|before| ends.get(before));
        ElementPlace {
            request,
            token: of_step.saturating_sub(before.copied().unwrap_or(0)),
            head,
            element: at.checked_rem(self.head_size).unwrap_or(0),
        }
    }
}

/// Where the query tokens of each request of a step end, dummies left out.
pub(super) fn request_ends(metadata: &AttentionMetadata) -> &[usize] {
    let ends = metadata.q_ends().ends();
    ends.get(..metadata.requests()).unwrap_or(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_has_a_place_of_its_own_in_either_order() {
        // Tokens 1 to 3 of a step of requests with 2, 0 and 2 tokens.
        let (ends, tokens) = ([2, 2, 4], [(0, 1), (2, 0), (2, 1)]);
        let rows = |order| TokenHeads { order, first_token: 1, tokens: 3, heads: 2, head_size: 5 };
        let (by_token, by_head) = (rows(TokenOrder::TokensFirst), rows(TokenOrder::HeadsFirst));
        for (nth, (request, token)) in tokens.into_iter().enumerate() {
            for head in 0..2 {
                for element in 0..5 {
                    let place = ElementPlace { request, token, head, element };
                    let at = [(nth * 2 + head) * 5, (head * 3 + nth) * 5].map(|row| row + element);
                    let found = [by_token.place(at[0], &ends), by_head.place(at[1], &ends)];
                    assert_eq!(found, [place; 2]);
                }
            }
        }
    }
}
