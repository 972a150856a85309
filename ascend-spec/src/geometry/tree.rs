//! Trees of draft tokens: a token sees the context, its ancestors and itself.

use super::Visibility;
use super::sparse_mode::clamp_len;
use std::ops::Range;

/// A tree (or several) of draft tokens that one step verifies, given by the parent of each token.
///
/// ```
/// use ascend_spec::Visibility;
/// use ascend_spec::geometry::TokenTree;
///
/// // 0 is the root; 1 and 2 are its children; 3 continues 1.
/// let tree = TokenTree::new(&[-1, 0, 0, 1])?;
/// let mask = tree.behind(2); // two tokens of context
/// assert!(mask.sees(3, 0) && mask.sees(3, 2) && mask.sees(3, 3) && mask.sees(3, 5));
/// assert!(!mask.sees(3, 4)); // token 2 is no ancestor of 3
/// # Ok::<(), ascend_spec::geometry::TreeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenTree {
    parents: Vec<Option<u32>>,
    depths: Vec<u32>,
    /// For each token a row of bits: itself and its ancestors.
    paths: Vec<u64>,
}

/// The error for a list of parents that is no tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// The parent is not an earlier token.
    #[error(
        "token {token} has parent {parent}; allowed: -1 for a root, or an earlier token (below {token}); fix: order \
         the tokens so that parents come first"
    )]
    Parent {
        /// Index of the token.
        token: usize,
        /// Its parent.
        parent: i64,
    },
    /// There are more tokens than [`TokenTree::MAX_LEN`].
    #[error("{len} tokens; allowed: at most {}; fix: verify fewer drafts in a step", TokenTree::MAX_LEN)]
    Length {
        /// Number of tokens.
        len: usize,
    },
}

impl TokenTree {
    /// Most tokens of a tree.
    pub const MAX_LEN: usize = 8192;

    /// The tree in which token `i` continues token `parents[i]`, an earlier one; -1 for a root.
    ///
    /// # Errors
    /// [`TreeError`].
    pub fn new(parents: &[i64]) -> Result<Self, TreeError> {
        let len = parents.len();
        if len > Self::MAX_LEN {
            return Err(TreeError::Length { len });
        }
        let words = len.div_ceil(64);
        let mut tree = TokenTree {
            parents: Vec::with_capacity(len),
            depths: Vec::with_capacity(len),
            paths: vec![0; len * words],
        };
        for (token, &parent) in parents.iter().enumerate() {
            let known = usize::try_from(parent).ok().filter(|&known| known < token);
            match known {
                Some(known) => {
                    let (earlier, own) = tree.paths.split_at_mut(token * words);
                    let path = &earlier[known * words..][..words];
                    own[..words].copy_from_slice(path);
                    let depth = tree.depths[known] + 1;
                    tree.depths.push(depth);
                }
                None if parent == -1 => tree.depths.push(0),
                None => return Err(TreeError::Parent { token, parent }),
            }
            tree.paths[token * words + token / 64] |= 1 << (token % 64);
            tree.parents.push(known.and_then(|known| u32::try_from(known).ok()));
        }
        Ok(tree)
    }

    /// A chain: every token continues the one before it.
    ///
    /// # Errors
    /// [`TreeError::Length`].
    pub fn chain(len: usize) -> Result<Self, TreeError> {
        if len > Self::MAX_LEN {
            return Err(TreeError::Length { len });
        }
        let parents: Vec<i64> = (0..len).map(|token| token as i64 - 1).collect();
        Self::new(&parents)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.parents.is_empty()
    }

    /// The token that `token` continues.
    pub fn parent(&self, token: usize) -> Option<usize> {
        self.parents.get(token).copied().flatten().map(|parent| parent as usize)
    }

    /// Number of ancestors: the token's position is the length of the context plus this. `None` if there is no such
    /// token.
    pub fn depth(&self, token: usize) -> Option<usize> {
        self.depths.get(token).map(|&depth| depth as usize)
    }

    /// Whether `token` is `ancestor` or one of its descendants.
    pub fn continues(&self, token: usize, ancestor: usize) -> bool {
        ancestor < self.len()
            && self.path(token).get(ancestor / 64).is_some_and(|word| word >> (ancestor % 64) & 1 == 1)
    }

    /// Bits of a token's ancestors and its own, the first token in the lowest bit of the first word; empty if there
    /// is no such token.
    pub fn path(&self, token: usize) -> &[u64] {
        let words = self.len().div_ceil(64);
        let start = token.saturating_mul(words);
        self.paths.get(start..start.saturating_add(words)).unwrap_or_default()
    }

    /// The mask of the tree after `context` keys that every token sees.
    pub const fn behind(&self, context: u64) -> TreeGeometry<'_> {
        TreeGeometry { tree: self, context }
    }
}

/// The columns of a mask that covers only the drafts: the last `Sq` of `Skv` keys. Every row sees the keys before
/// them.
///
/// This is how sparse mode 9 reads its mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftColumns {
    /// Key of column 0; below 0 where there are more rows than keys.
    first: i64,
}

impl DraftColumns {
    /// The columns for a sequence of `q_len` rows and `kv_len` keys.
    pub fn new(q_len: u64, kv_len: u64) -> Self {
        DraftColumns { first: clamp_len(kv_len) - clamp_len(q_len) }
    }

    /// Number of keys before column 0.
    pub fn context(self) -> u64 {
        u64::try_from(self.first).unwrap_or(0)
    }

    /// Column of key `j`; `None` for a key of the context.
    pub fn column(self, j: u64) -> Option<u64> {
        u64::try_from(clamp_len(j) - self.first).ok()
    }
}

/// What the tokens of a tree see: a row and a key for each token, with the keys after those of the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeGeometry<'a> {
    tree: &'a TokenTree,
    context: u64,
}

impl Visibility for TreeGeometry<'_> {
    fn q_len(&self) -> u64 {
        self.tree.len() as u64
    }

    fn kv_len(&self) -> u64 {
        self.context.saturating_add(self.tree.len() as u64)
    }

    /// In constant time.
    fn sees(&self, i: u64, j: u64) -> bool {
        let Some(token) = usize::try_from(i).ok().filter(|&token| token < self.tree.len()) else {
            return false;
        };
        match j.checked_sub(self.context) {
            None => true,
            Some(other) => usize::try_from(other).is_ok_and(|other| self.tree.continues(token, other)),
        }
    }

    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
        let Some(token) = usize::try_from(i).ok().filter(|&token| token < self.tree.len()) else {
            return;
        };
        let end = self.kv_len();
        // The run so far; consecutive tokens of the path extend it.
        let mut run = 0..self.context;
        for (word, &bits) in self.tree.path(token).iter().enumerate() {
            let mut left = bits;
            while left != 0 {
                let first = left.trailing_zeros();
                let ones = (left >> first).trailing_ones();
                left = if first + ones == 64 { 0 } else { left >> (first + ones) << (first + ones) };
                let start = self.context.saturating_add(word as u64 * 64 + u64::from(first)).min(end);
                let stop = start.saturating_add(u64::from(ones)).min(end);
                if start == run.end {
                    run.end = stop;
                } else {
                    if !run.is_empty() {
                        visit(run);
                    }
                    run = start..stop;
                }
            }
        }
        if !run.is_empty() {
            visit(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parents(most: usize) -> impl Strategy<Value = Vec<i64>> {
        proptest::collection::vec(any::<u32>(), 0..most).prop_map(|seeds| {
            let parent = |(i, &seed): (usize, &u32)| i64::from(seed) % (i as i64 + 1) - 1;
            seeds.iter().enumerate().map(parent).collect()
        })
    }

    /// The definition: up the parents until there is none.
    fn continues(parents: &[i64], token: usize, ancestor: usize) -> bool {
        let parent = |&t: &usize| usize::try_from(parents[t]).ok();
        std::iter::successors(Some(token), parent).any(|t| t == ancestor)
    }

    proptest! {
        #[test]
        fn tokens_see_context_ancestors_and_themselves(parents in parents(140), context in 0u64..70) {
            let tree = TokenTree::new(&parents).unwrap();
            let mask = tree.behind(context);
            for i in 0..tree.len() {
                let mut seen = vec![false; mask.kv_len() as usize];
                let mut end = None;
                mask.each_run(i as u64, &mut |run| {
                    assert!(!run.is_empty() && end.is_none_or(|end| end < run.start));
                    end = Some(run.end);
                    seen[run.start as usize..run.end as usize].fill(true);
                });
                let want = |j: usize| j < context as usize || continues(&parents, i, j - context as usize);
                for (j, &seen) in seen.iter().enumerate() {
                    prop_assert_eq!(seen, want(j), "{} {}", i, j);
                    prop_assert_eq!(mask.sees(i as u64, j as u64), want(j));
                }
                let ancestors = (0..tree.len()).filter(|&j| tree.continues(i, j)).count();
                prop_assert_eq!(tree.depth(i), Some(ancestors - 1));
            }
        }

        #[test]
        fn any_list_and_index_is_safe(
            parents in proptest::collection::vec(any::<i64>(), 0..6), token: usize, context: u64, i: u64,
        ) {
            if let Ok(tree) = TokenTree::new(&parents) {
                let _ = (tree.parent(token), tree.depth(token), tree.continues(token, token), tree.path(token));
                let mask = tree.behind(context);
                let _ = (mask.kv_len(), mask.sees(i, i));
            }
        }
    }

    #[test]
    fn lists_that_make_no_tree_are_refused() {
        let parent = |token, parent| Err(TreeError::Parent { token, parent });
        assert_eq!(TokenTree::new(&[0]), parent(0, 0));
        assert_eq!(TokenTree::new(&[-1, 2, 0]), parent(1, 2));
        assert_eq!(TokenTree::new(&[-2]), parent(0, -2));
        let len = TokenTree::MAX_LEN + 1;
        assert_eq!(TokenTree::chain(len), Err(TreeError::Length { len }));
        assert!(TokenTree::new(&[]).unwrap().is_empty());
    }

    #[test]
    fn columns_of_drafts_begin_behind_the_context() {
        for (q_len, kv_len) in [(3, 8), (3, 3), (5, 3), (0, 4), (4, 0)] {
            let columns = DraftColumns::new(q_len, kv_len);
            let context = kv_len.saturating_sub(q_len);
            assert_eq!(columns.context(), context);
            for j in 0..kv_len {
                let want = (j + q_len).checked_sub(kv_len);
                assert_eq!(columns.column(j), want, "{q_len} {kv_len} {j}");
                assert_eq!(want.is_none(), j < context);
            }
        }
        let most = DraftColumns::new(u64::MAX, 0).column(u64::MAX);
        assert!(most.is_some());
    }

    #[test]
    fn a_chain_is_causal() {
        let tree = TokenTree::chain(70).unwrap();
        let mask = tree.behind(5);
        for i in 0..70 {
            let mut runs = Vec::new();
            mask.each_run(i, &mut |run| runs.push(run));
            assert_eq!((runs.len(), &runs[0]), (1, &(0..i + 6)));
        }
    }
}
