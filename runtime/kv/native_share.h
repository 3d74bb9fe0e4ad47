/* Which rows of a step read the same slots: runs of blocks, each with the rows whose tables agree on it.
 *
 * Agents that share a prefix name the same slots for it, whether they were forked or found the blocks by
 * their hash. Their query heads against such a block are one product, which unpacks it once. Computed once per
 * step; the layers of a group use it in turn. Included by native.c. */

/* The blocks that row r sees: [*from, result). */
static int64_t visible_blocks(const struct step *s, int64_t r, int64_t *from) {
    int64_t blocks = over(s->sealed[r], BLOCK);
    *from = least(s->start[r] / BLOCK, blocks);
    return blocks;
}

/* Fill s->runs and s->members, each with room for as many as all rows' visible blocks. Every visible block
 * of every row is in one run. Returns the number of runs, or -1 without memory. */
API int64_t offbook_share(struct step *s) {
    const int32_t rows = (int32_t)s->rows;
    int32_t *scratch = malloc((size_t)(rows + 1) * 5 * sizeof *scratch);
    if (!scratch) return -1;
    /* Of each row: the first row with its slot, at this block and at the one before (-1: not visible); of each
     * first row: whether its followers are others than before, and its run. */
    int32_t *leader = scratch, *before = leader + rows, *changed = before + rows, *run = changed + rows, *leaders = run + rows;
    int64_t first = INT64_MAX, last = 0, from, count = 0, at = 0;
    for (int32_t r = 0; r < rows; r++) {
        int64_t to = visible_blocks(s, r, &from);
        if (from < to) first = least(first, from), last = most(last, to);
        before[r] = -1;
    }
    for (int64_t b = first; b < last; b++) {
        int32_t found = 0;
        for (int32_t r = 0; r < rows; r++) {
            int64_t to = visible_blocks(s, r, &from);
            changed[r] = 0;
            leader[r] = -1;
            if (b < from || b >= to) continue;
            const int32_t slot = s->blocks[s->block_at[r] + b], old = before[r];
            if (old >= 0 && old < r && leader[old] == old && s->blocks[s->block_at[old] + b] == slot) {
                leader[r] = old;
                continue;
            }
            for (int32_t i = 0; i < found && leader[r] < 0; i++)
                if (s->blocks[s->block_at[leaders[i]] + b] == slot) leader[r] = leaders[i];
            if (leader[r] < 0) leader[r] = leaders[found++] = r;
        }
        for (int32_t r = 0; r < rows; r++)
            if (leader[r] != before[r]) {
                if (leader[r] >= 0) changed[leader[r]] = 1;
                if (before[r] >= 0) changed[before[r]] = 1;
            }
        for (int32_t i = 0; i < found; i++) {
            const int32_t l = leaders[i];
            if (!changed[l]) {
                s->runs[run[l]].last++;
                continue;
            }
            run[l] = (int32_t)count;
            struct run *new = &s->runs[count++];
            *new = (struct run){(int32_t)b, (int32_t)b + 1, (int32_t)at, 0};
            for (int32_t r = l; r < rows; r++)
                if (leader[r] == l) s->members[at++] = r, new->count++;
        }
        int32_t *swap = before;
        before = leader, leader = swap;
    }
    free(scratch);
    s->run_count = count;
    return count;
}
