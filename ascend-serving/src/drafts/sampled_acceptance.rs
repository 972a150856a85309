//! Acceptance of drafts by rejection sampling: the resulting tokens are distributed as the model's own.
//!
//! For one draft `x` drawn from `q` where the model has `p`: accept it with the probability `min(1, p(x) / q(x))`,
//! otherwise draw from the excess of `p` over `q` (Leviathan, Kalman and Matias, "Fast Inference from Transformers
//! via Speculative Decoding"; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling").
//! Siblings are tried one after another, each against what the rejected ones have left of `p` (Miao et al.,
//! "SpecInfer").

use ascend_attention::Violation;

use crate::rules;

use super::{AcceptedDrafts, DraftTree};

/// How the drafts after a node were found, which decides with what probability they are accepted.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum DraftSource<'a> {
    /// Without chance: the likeliest tokens of a drafter, n-grams of the prompt.
    Fixed,
    /// Drawn from a distribution for each node, `[nodes, vocabulary]`, siblings independently: a token may occur
    /// twice.
    Independent(&'a [f32]),
    /// Drawn from a distribution for each node, `[nodes, vocabulary]`, siblings without replacement: in their order,
    /// each from what the earlier ones have left.
    Distinct(&'a [f32]),
}

/// The input of [`DraftTree::accept_sampled`]. Rows of nodes that the walk does not reach are not read.
#[derive(Clone, Copy, Debug)]
pub struct SampledDrafts<'a> {
    /// The token of each node; that of the root is not read.
    pub tokens: &'a [u32],
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// The model's distribution of the token after each node, `[nodes, vocabulary]`, with temperature, top-k and the
    /// like applied.
    pub target: &'a [f32],
    /// How the drafts were found.
    pub source: DraftSource<'a>,
    /// A random number for each node, uniform from 0 up to, but not including, 1, and used once: the number of a
    /// draft decides on it, that of the root chooses the token after the accepted ones.
    pub uniform: &'a [f64],
}

/// How far from 1 a sum of probabilities may be: they come from kernels of 16 bits.
const SUM_TOLERANCE: f64 = 0.02;

/// A distribution: weights of at least 0, and their sum.
struct Distribution {
    weights: Vec<f64>,
    sum: f64,
}

impl Distribution {
    /// The row of a node, if it is a distribution.
    fn of_row(rows: &[f32], node: usize, vocabulary: usize) -> Result<Self, Violation> {
        let row = &rows[node * vocabulary..][..vocabulary];
        let weights: Vec<f64> = row.iter().map(|weight| f64::from(*weight)).collect();
        let sum: f64 = weights.iter().sum();
        // The sum shows NaN and infinities.
        let wrong = weights.iter().position(|weight| *weight < 0.0);
        if wrong.is_none() && (sum - 1.0).abs() <= SUM_TOLERANCE {
            return Ok(Self { weights, sum });
        }
        let given = match wrong {
            Some(token) => format!("{} for token {token} behind node {node}", weights[token]),
            None => format!("a sum of {sum} behind node {node}"),
        };
        let allowed = format_args!("numbers of at least 0 with a sum of 1, give or take {SUM_TOLERANCE}");
        let rule = &rules::DRAFT_PROBABILITY;
        let cut_off = wrong.is_none() && sum > 0.0 && weights.iter().all(|weight| *weight <= 1.0);
        Err(match cut_off {
            true => Violation::new(
                rule,
                given,
                allowed,
                "where tokens were cut off, as by top-p, divide the row by its sum; where these are logits, apply \
                 softmax",
            ),
            false => rule.broken(given, allowed),
        })
    }

    /// The probability of a token of the vocabulary.
    fn probability(&self, token: usize) -> f64 {
        match self.sum > 0.0 {
            true => self.weights[token] / self.sum,
            false => 0.0,
        }
    }

    /// Sets the weight of a token to 0.
    fn remove(&mut self, token: usize) {
        self.weights[token] = 0.0;
        self.sum = self.weights.iter().sum();
    }

    /// The excess of this distribution over another one, for each token at least 0.
    fn excess_over(&self, other: &Self) -> Self {
        let excess = |token| (self.probability(token) - other.probability(token)).max(0.0);
        let weights: Vec<f64> = (0..self.weights.len()).map(excess).collect();
        let sum = weights.iter().sum();
        Self { weights, sum }
    }

    /// The token at which the cumulative weight passes the share `place`, from 0 to 1; `None` without weights.
    fn token_at(&self, place: f64) -> Option<u32> {
        let mut cumulative = 0.0;
        let mut last = None;
        for (token, weight) in self.weights.iter().enumerate() {
            if *weight > 0.0 {
                cumulative += weight;
                last = u32::try_from(token).ok();
                if cumulative > place * self.sum {
                    break;
                }
            }
        }
        last
    }
}

impl DraftTree {
    /// Walks the tree by rejection sampling. The accepted drafts and the token after them are distributed as the
    /// target, whatever the drafts are. A draft whose probability is `p` by the target and `q` by its source is
    /// accepted with the probability `min(1, p / q)`. After each rejected draft the target becomes the residual
    /// `max(0, p - q)` of every token, divided by their sum; where all drafts after a node are rejected, the next
    /// token is drawn from it. A draft of [`DraftSource::Fixed`] has `q = 1`.
    ///
    /// ```
    /// use ascend_serving::{DraftSource, DraftTree, SampledDrafts};
    ///
    /// // One draft, token 1 of three, and what the model says behind the root and behind the draft.
    /// let tree = DraftTree::chain(1)?;
    /// let drafts = SampledDrafts {
    ///     tokens: &[7, 1],
    ///     vocabulary: 3,
    ///     target: &[0.2, 0.5, 0.3, 0.0, 0.0, 1.0],
    ///     source: DraftSource::Independent(&[0.1, 0.8, 0.1, 1.0, 0.0, 0.0]),
    ///     uniform: &[0.3, 0.6],
    /// };
    /// // 0.6 is below 0.5 / 0.8: the draft is accepted, and token 2 is behind it.
    /// let accepted = tree.accept_sampled(&drafts)?;
    /// assert_eq!((accepted.nodes, accepted.bonus), (vec![0, 1], 2));
    /// # Ok::<(), ascend_serving::Violation>(())
    /// ```
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) unless there is a token, a random number and a row of
    /// `vocabulary` numbers for every node; [`DRAFT_UNIFORM`](crate::rules::DRAFT_UNIFORM) for a random number that
    /// is not below 1 or not at least 0; [`DRAFT_PROBABILITY`](crate::rules::DRAFT_PROBABILITY) for a row that the
    /// walk reaches and that is no distribution, and for drafts that are no token or cannot have been drawn.
    pub fn accept_sampled(&self, drafts: &SampledDrafts<'_>) -> Result<AcceptedDrafts<u32>, Violation> {
        self.check_counts(drafts)?;
        let mut nodes = vec![0];
        let mut node = 0;
        loop {
            let target = Distribution::of_row(drafts.target, node, drafts.vocabulary)?;
            match self.walk_on(node, &target, drafts)? {
                Walk::Child(child) => {
                    nodes.push(child);
                    node = child;
                }
                Walk::End(rest) => {
                    let place = drafts.uniform[0];
                    // The residual can be empty by rounding alone, where the drafts were as likely as the target has
                    // them.
                    let bonus = rest.token_at(place).or_else(|| target.token_at(place));
                    let Some(bonus) = bonus else {
                        return Err(Violation::new(
                            &rules::DRAFT_PROBABILITY,
                            format_args!("nothing behind node {node}"),
                            "a token with a probability above 0",
                            "give the model's probabilities of all tokens in each row of the target",
                        ));
                    };
                    return Ok(AcceptedDrafts { nodes, bonus });
                }
            }
        }
    }

    /// The first accepted child of a node, or what the rejected ones leave of the target.
    fn walk_on(&self, node: usize, target: &Distribution, drafts: &SampledDrafts<'_>) -> Result<Walk, Violation> {
        let mut rest = Distribution { weights: target.weights.clone(), sum: target.sum };
        let mut child = self.next_token()[node];
        let mut source = match drafts.source {
            DraftSource::Independent(rows) | DraftSource::Distinct(rows) if child.is_some() => {
                Some(Distribution::of_row(rows, node, drafts.vocabulary)?)
            }
            _ => None,
        };
        while let Some(node) = child {
            let token = drafts.tokens[node] as usize;
            if token >= drafts.vocabulary {
                return Err(Violation::new(
                    &rules::DRAFT_PROBABILITY,
                    format_args!("token {token} of node {node}"),
                    format_args!("a token of the vocabulary, below {}", drafts.vocabulary),
                    "bring the tokens and the distributions of one vocabulary",
                ));
            }
            let drawn = source.as_ref().map_or(1.0, |source| source.probability(token));
            if drawn <= 0.0 {
                return Err(Violation::new(
                    &rules::DRAFT_PROBABILITY,
                    format_args!("token {token} of node {node}, drawn with the probability 0"),
                    "a token that its source can give",
                    "give the distribution that the drafts behind the node were drawn from; for tokens that were not \
                     drawn, `DraftSource::Fixed`",
                ));
            }
            if drafts.uniform[node] * drawn < rest.probability(token) {
                return Ok(Walk::Child(node));
            }
            match &mut source {
                None => rest.remove(token),
                Some(source) => {
                    rest = rest.excess_over(source);
                    if matches!(drafts.source, DraftSource::Distinct(_)) {
                        source.remove(token);
                    }
                }
            }
            child = self.next_sibling()[node];
        }
        Ok(Walk::End(rest))
    }

    /// Refuses lists that do not fit the number of nodes.
    fn check_counts(&self, drafts: &SampledDrafts<'_>) -> Result<(), Violation> {
        let nodes = self.nodes();
        let all = nodes.checked_mul(drafts.vocabulary);
        let rows = |name: &'static str, len: usize| (name, len, all);
        let source = match drafts.source {
            DraftSource::Fixed => None,
            DraftSource::Independent(rows) | DraftSource::Distinct(rows) => Some(rows.len()),
        };
        let counts = [
            Some(("tokens", drafts.tokens.len(), Some(nodes))),
            Some(("random numbers", drafts.uniform.len(), Some(nodes))),
            Some(rows("target probabilities", drafts.target.len())),
            source.map(|len| rows("draft probabilities", len)),
        ];
        for (name, given, wanted) in counts.into_iter().flatten() {
            if Some(given) != wanted {
                return Err(Violation::new(
                    &rules::LENGTHS_BATCH,
                    format_args!("{given} {name}"),
                    format_args!(
                        "one for each of the {nodes} nodes; of probabilities, a row of {} for each",
                        drafts.vocabulary
                    ),
                    "count the root too, and give rows for leaves",
                ));
            }
        }
        if drafts.vocabulary == 0 || u32::try_from(drafts.vocabulary).is_err() {
            return Err(Violation::new(
                &rules::DRAFT_PROBABILITY,
                format_args!("a vocabulary of {} tokens", drafts.vocabulary),
                format_args!("1 to {}", u32::MAX),
                "give the number of tokens for which the model has logits",
            ));
        }
        match drafts.uniform.iter().find(|place| !(0.0..1.0).contains(*place)) {
            None => Ok(()),
            Some(place) => Err(rules::DRAFT_UNIFORM.broken(place, "0 up to, but not including, 1")),
        }
    }
}

/// A step of the walk.
enum Walk {
    /// The walk goes on to this child.
    Child(usize),
    /// Every child is rejected; this is what they leave of the target.
    End(Distribution),
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::tests::parents;
    use super::*;
    use proptest::prelude::*;

    const VOCABULARY: usize = 5;
    /// Distributions after no token, and after each token: the model's, and the drafter's.
    const TARGET: [[f32; VOCABULARY]; 2] = [[0.05, 0.4, 0.3, 0.0, 0.25], [0.2, 0.0, 0.1, 0.6, 0.1]];
    const DRAFT: [[f32; VOCABULARY]; 2] = [[0.5, 0.1, 0.1, 0.2, 0.1], [0.1, 0.3, 0.3, 0.2, 0.1]];

    /// The distribution after a node: the first at the root, after a token the second, rotated by the token.
    fn behind(rows: &[[f32; VOCABULARY]; 2], token: Option<u32>) -> [f32; VOCABULARY] {
        match token {
            None => rows[0],
            Some(token) => {
                let mut row = rows[1];
                row.rotate_right(token as usize);
                row
            }
        }
    }

    #[test]
    fn a_row_without_its_tail_is_divided_and_not_made_uniform() {
        let fix = |row: [f32; 3]| {
            let refused = Distribution::of_row(&row, 0, 3).err().map(|refused| refused.fix);
            refused.unwrap_or_default()
        };
        assert!(fix([0.5, 0.4, 0.0]).contains("divide the row by its sum"));
        assert!(fix([5.0, 4.0, 0.0]).contains("softmax"));
        assert!(fix([-5.0, 4.0, 2.0]).contains("softmax"));
        assert_eq!(fix([0.5, 0.49, 0.0]), "");
    }

    /// SplitMix64, as numbers from 0 to 1.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = self.0;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((bits ^ (bits >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        }

        /// A token, by the weights.
        fn token(&mut self, weights: &[f32]) -> u32 {
            let mut place = self.next() * f64::from(weights.iter().sum::<f32>());
            for (token, weight) in weights.iter().enumerate() {
                place -= f64::from(*weight);
                if place < 0.0 && *weight > 0.0 {
                    return token as u32;
                }
            }
            weights.iter().rposition(|weight| *weight > 0.0).unwrap() as u32
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        Fixed,
        Independent,
        Distinct,
    }

    /// Tokens of a tree's nodes as a drafter finds them, and the rows of distributions after the nodes.
    fn drafted(tree: &DraftTree, way: Way, random: &mut Random) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
        let mut tokens: Vec<u32> = vec![0];
        for node in 1..tree.nodes() {
            let parent = tree.parent(node).unwrap();
            let mut weights = behind(&DRAFT, (parent > 0).then(|| tokens[parent]));
            let siblings: Vec<usize> = (1..node).filter(|other| tree.parent(*other) == Some(parent)).collect();
            tokens.push(match way {
                Way::Fixed => (siblings.len() as u32 * 2 + 1) % VOCABULARY as u32,
                Way::Independent => random.token(&weights),
                Way::Distinct => {
                    siblings.iter().for_each(|sibling| weights[tokens[*sibling] as usize] = 0.0);
                    random.token(&weights)
                }
            });
        }
        let rows = |model| {
            let each = tokens.iter().enumerate();
            let each = each.flat_map(|(node, token)| behind(model, (node > 0).then_some(*token)));
            each.collect::<Vec<f32>>()
        };
        (tokens.clone(), rows(&TARGET), rows(&DRAFT))
    }

    /// How far counts of pairs of tokens are from the model's probabilities, as chi-square over the pairs that can
    /// occur.
    fn chi_square(counts: &[[f64; VOCABULARY]; VOCABULARY]) -> f64 {
        let draws: f64 = counts.iter().flatten().sum();
        let mut sum = 0.0;
        for (first, row) in counts.iter().enumerate() {
            for (second, count) in row.iter().enumerate() {
                let likely = TARGET[0][first] * behind(&TARGET, Some(first as u32))[second];
                let expected = draws * f64::from(likely);
                match expected > 0.0 {
                    true => sum += (count - expected).powi(2) / expected,
                    false => assert_eq!(*count, 0.0, "token {second} behind {first} cannot be"),
                }
            }
        }
        sum
    }

    /// Chi-square of this many degrees of freedom at most (16 pairs can be) is above this once in 10 million.
    const MOST: f64 = 61.0;

    /// The first two tokens of many walks. `residual` is what the walk ends with where no draft is accepted: `true`
    /// for what it gives, `false` for a draw from the whole target.
    fn first_two(tree: &DraftTree, way: Way, residual: bool) -> f64 {
        let mut random = Random(7);
        let mut counts = [[0.0; VOCABULARY]; VOCABULARY];
        for _ in 0..20_000 {
            let (tokens, target, draft) = drafted(tree, way, &mut random);
            let uniform: Vec<f64> = (0..tree.nodes()).map(|_| random.next()).collect();
            let accepted = tree
                .accept_sampled(&SampledDrafts {
                    tokens: &tokens,
                    vocabulary: VOCABULARY,
                    target: &target,
                    source: match way {
                        Way::Fixed => DraftSource::Fixed,
                        Way::Independent => DraftSource::Independent(&draft),
                        Way::Distinct => DraftSource::Distinct(&draft),
                    },
                    uniform: &uniform,
                })
                .unwrap();
            let path = accepted.nodes.iter().skip(1).map(|node| tokens[*node]);
            let mut got: Vec<u32> = path.collect();
            let before = got.last().copied();
            got.push(match residual {
                true => accepted.bonus,
                false => random.token(&behind(&TARGET, before)),
            });
            if got.len() == 1 {
                got.push(random.token(&behind(&TARGET, Some(got[0]))));
            }
            counts[got[0] as usize][got[1] as usize] += 1.0;
        }
        chi_square(&counts)
    }

    #[test]
    fn tokens_are_distributed_as_the_model_says() {
        for parents in [&[-1, 0, 1][..], &[-1, 0, 0, 0, 1, 1, 2], &[-1, 0, 0]] {
            let tree = DraftTree::from_parents(parents).unwrap();
            for way in [Way::Fixed, Way::Independent, Way::Distinct] {
                let right = first_two(&tree, way, true);
                assert!(right < MOST, "{parents:?} {way:?}: {right}");
                // The test can tell a wrong residual from the right one.
                let wrong = first_two(&tree, way, false);
                assert!(wrong > 3.0 * MOST, "{parents:?} {way:?}: {wrong}");
            }
        }
    }

    #[test]
    fn drafts_of_the_models_own_distribution_are_all_accepted() {
        let tree = DraftTree::chain(3).unwrap();
        let target = [0.25f32; 16];
        let accepted = tree
            .accept_sampled(&SampledDrafts {
                tokens: &[9, 3, 0, 1],
                vocabulary: 4,
                target: &target,
                source: DraftSource::Independent(&target),
                uniform: &[0.6, 0.999_999, 0.0, 0.5],
            })
            .unwrap();
        assert_eq!((accepted.nodes, accepted.bonus), (vec![0, 1, 2, 3], 2));
    }

    #[test]
    fn what_is_no_distribution_is_refused() {
        let tree = DraftTree::chain(1).unwrap();
        let right = SampledDrafts {
            tokens: &[0, 1],
            vocabulary: 2,
            target: &[0.5, 0.5, 1.0, 0.0],
            source: DraftSource::Independent(&[0.5, 0.5, 0.5, 0.5]),
            uniform: &[0.5, 0.5],
        };
        let rule = |drafts: SampledDrafts<'_>| tree.accept_sampled(&drafts).unwrap_err().rule;
        assert!(tree.accept_sampled(&right).is_ok());
        for target in [
            [0.5, 0.6, 1.0, 0.0],
            [1.5, -0.5, 1.0, 0.0],
            [f32::NAN, 0.5, 1.0, 0.0],
            [f32::INFINITY, 0.0, 1.0, 0.0],
            [0.5, 0.5, 0.0, 0.0],
        ] {
            let wrong = SampledDrafts { target: &target, ..right };
            assert_eq!(rule(wrong), &rules::DRAFT_PROBABILITY, "{target:?}");
        }
        for source in [[1.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.5]] {
            for source in [DraftSource::Independent(&source), DraftSource::Distinct(&source)] {
                assert_eq!(rule(SampledDrafts { source, ..right }), &rules::DRAFT_PROBABILITY);
            }
        }
        let unknown = SampledDrafts { tokens: &[0, 2], source: DraftSource::Fixed, ..right };
        assert_eq!(rule(unknown), &rules::DRAFT_PROBABILITY);
        for uniform in [[0.5, 1.0], [-0.1, 0.5], [f64::NAN, 0.5]] {
            assert_eq!(rule(SampledDrafts { uniform: &uniform, ..right }), &rules::DRAFT_UNIFORM);
        }
        for wrong in [
            SampledDrafts { tokens: &[0], ..right },
            SampledDrafts { uniform: &[0.5], ..right },
            SampledDrafts { vocabulary: 3, ..right },
            SampledDrafts { vocabulary: usize::MAX, ..right },
            SampledDrafts { source: DraftSource::Distinct(&[0.5]), ..right },
        ] {
            assert_eq!(rule(wrong), &rules::LENGTHS_BATCH);
        }
        let none = SampledDrafts { vocabulary: 0, target: &[], source: DraftSource::Fixed, ..right };
        assert_eq!(rule(none), &rules::DRAFT_PROBABILITY);
    }

    proptest! {
        /// The walk goes from parents to children, and ends with a token that the model can give there.
        #[test]
        fn walks_are_paths(parents in parents(9), seed in any::<u64>(), way in 0..3) {
            let tree = DraftTree::from_parents(&parents).unwrap();
            let way = [Way::Fixed, Way::Independent, Way::Distinct][way as usize];
            let children = |node: usize| (1..tree.nodes()).filter(|child| tree.parent(*child) == Some(node)).count();
            // Without replacement there are as many siblings as tokens.
            prop_assume!(way != Way::Distinct || (0..tree.nodes()).all(|node| children(node) <= VOCABULARY));
            let mut random = Random(seed);
            let (tokens, target, draft) = drafted(&tree, way, &mut random);
            let uniform: Vec<f64> = (0..tree.nodes()).map(|_| random.next()).collect();
            let accepted = tree.accept_sampled(&SampledDrafts {
                tokens: &tokens,
                vocabulary: VOCABULARY,
                target: &target,
                source: match way {
                    Way::Fixed => DraftSource::Fixed,
                    Way::Independent => DraftSource::Independent(&draft),
                    Way::Distinct => DraftSource::Distinct(&draft),
                },
                uniform: &uniform,
            }).unwrap();
            prop_assert_eq!(accepted.nodes[0], 0);
            for pair in accepted.nodes.windows(2) {
                prop_assert_eq!(tree.parent(pair[1]), Some(pair[0]));
            }
            let row = |node: usize| &target[node * VOCABULARY..][..VOCABULARY];
            for node in accepted.nodes.iter().skip(1) {
                prop_assert!(row(tree.parent(*node).unwrap())[tokens[*node] as usize] > 0.0);
            }
            prop_assert!(row(*accepted.nodes.last().unwrap())[accepted.bonus as usize] > 0.0);
        }

        /// Any numbers at all: an answer or a refusal.
        #[test]
        fn nothing_panics(
            numbers in prop_oneof![
                prop::collection::vec(any::<f32>(), 9),
                prop::collection::vec(prop::sample::select(&[0.0, 0.25, 0.5, 1.0, f32::MIN_POSITIVE][..]), 9),
                // Distributions of three tokens in all but the last bits.
                prop::collection::vec((0u8..3).prop_map(|x| [1.0, 0.5, 0.25][x as usize]), 9)
                    .prop_map(|rows| rows.chunks(3).flat_map(|row| {
                        let sum: f32 = row.iter().sum();
                        row.iter().map(move |x| x / sum).collect::<Vec<_>>()
                    }).collect()),
            ],
            tokens in prop::collection::vec(prop_oneof![0..4u32, any::<u32>()], 3),
            uniform in prop::collection::vec(prop_oneof![0.0..1.0f64, any::<f64>()], 3),
        ) {
            let tree = DraftTree::from_parents(&[-1, 0, 0]).unwrap();
            for source in [DraftSource::Fixed, DraftSource::Independent(&numbers), DraftSource::Distinct(&numbers)] {
                let _ = tree.accept_sampled(&SampledDrafts {
                    tokens: &tokens,
                    vocabulary: 3,
                    target: &numbers,
                    source,
                    uniform: &uniform,
                });
            }
        }
    }
}
