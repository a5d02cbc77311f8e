/* The vector code of _attention.c for one kind of processor, which sets TARGET, NAME, LANES and TILE. Undefines them again.

   Vectors are those of GCC and Clang, so the compiler chooses instructions; products and sums of one expression become one fused
   instruction. `count` below is how many vectors of rows there are, 1 to 3: always a constant where these functions are inlined,
   so loops over it and over TILE vanish and `sums` are registers. */

typedef float NAME(Vector) __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t NAME(Whole) __attribute__((vector_size(4 * LANES), may_alias));

#define VECTOR NAME(Vector)
#define WHOLE NAME(Whole)
#define INLINE TARGET static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Return a where `mask` is set, else b. Comparisons with NaN are not so; which way round they are asked decides who wins. */
INLINE VECTOR NAME(choose)(WHOLE mask, VECTOR a, VECTOR b)
{
    return (VECTOR)((mask & (WHOLE)a) | (~mask & (WHOLE)b));
}

/* Return 2^x for x <= 0 to 2e-7 of itself; 0 from -127 on downwards; NaN for NaN. */
INLINE VECTOR NAME(power)(VECTOR x)
{
    const VECTOR least = (VECTOR){0} - 127.0f;
    x = NAME(choose)(x < least, least, x);
    /* Adding this rounds to a whole number, and leaves it plus 127 in the lowest bits: the exponent of a float. */
    const float shift = 12582912.0f + 127.0f;
    VECTOR moved = x + shift, part = x - (moved - shift);
    VECTOR y = part * 1.3264727e-3f + 9.671513e-3f;     /* the least relative error on -0.5 … 0.5, with 2^0 = 1 to the bit */
    y = y * part + 5.5507336e-2f;
    y = y * part + 2.4022242e-1f;
    y = y * part + 6.93147e-1f;
    y = y * part + 1.0f;
    return y * (VECTOR)((WHOLE)moved << 23);
}

/* S[key][count] = K · Qt for `keys` keys. The last tile repeats its last key; what it gives there is not used. */
INLINE void NAME(scores)(VECTOR *s, const VECTOR *qt, const float *k, int64_t stride, int64_t keys, int64_t width, const int count)
{
    for (int64_t key = 0; key < keys; key += TILE) {
        const float *row[TILE];
        VECTOR sums[TILE][3];
        UNROLL for (int i = 0; i < TILE; i++) {
            row[i] = k + (key + i < keys ? key + i : keys - 1) * stride;
            for (int64_t x = 0; x < width; x += 16)
                __builtin_prefetch(row[i] + KEYS * stride + x);
            UNROLL for (int v = 0; v < count; v++)
                sums[i][v] = (VECTOR){0};
        }
        for (int64_t x = 0; x < width; x++) {
            VECTOR q[3];
            UNROLL for (int v = 0; v < count; v++)
                q[v] = qt[x * count + v];
            UNROLL for (int i = 0; i < TILE; i++)
                UNROLL for (int v = 0; v < count; v++)
                    sums[i][v] += q[v] * row[i][x];
        }
        UNROLL for (int i = 0; i < TILE; i++)
            UNROLL for (int v = 0; v < count; v++)
                s[(key + i) * count + v] = sums[i][v];
    }
}

/* Ot[x][count] = Ot · scale + sum over keys of V · P. */
INLINE void NAME(add_values)(VECTOR *ot, const VECTOR *scale, const VECTOR *p, const float *values, int64_t stride, int64_t keys,
                             int64_t width, const int count)
{
    for (int64_t x = 0; x < width; x += TILE) {
        VECTOR sums[TILE][3];
        UNROLL for (int i = 0; i < TILE; i++)
            UNROLL for (int v = 0; v < count; v++)
                sums[i][v] = ot[(x + i) * count + v] * scale[v];
        for (int64_t key = 0; key < keys; key++) {
            const float *row = values + key * stride + x;
            VECTOR shares[3];
            UNROLL for (int v = 0; v < count; v++)
                shares[v] = p[key * count + v];
            UNROLL for (int i = 0; i < TILE; i++)
                UNROLL for (int v = 0; v < count; v++)
                    sums[i][v] += shares[v] * row[i];
        }
        UNROLL for (int i = 0; i < TILE; i++)
            UNROLL for (int v = 0; v < count; v++)
                ot[(x + i) * count + v] = sums[i][v];
    }
}

/* Some rows, a lane each, against keys first … end-1 of the part: at most KEYS of them. stats: maxima, then weights. `low` and
   `high`: the first key that a row sees, and the first behind its last, counted in the part; NULL: it sees all of these. */
INLINE void NAME(block)(const Task *task, VECTOR *ot, VECTOR *stats, VECTOR *s, const VECTOR *qt, const WHOLE *low, const WHOLE *high,
                        int64_t first, int64_t end, const int count)
{
    const Call *c = task->call;
    const float *k = task->part->keys + task->head * task->part->key_head + first * c->kept_key_row;
    const float *values = task->part->values + task->head * task->part->value_head + first * c->kept_value_row;
    VECTOR most[3], scale[3], sum[3];
    NAME(scores)(s, qt, k, c->kept_key_row, end - first, c->key_width, count);
    UNROLL for (int v = 0; v < count; v++) {
        const VECTOR hidden = (VECTOR){0} - INFINITY;
        VECTOR m = stats[v];
        for (int64_t key = 0; key < end - first; key++) {
            VECTOR score = s[key * count + v];
            if (low) {
                const WHOLE at = (WHOLE){0} + (int32_t)(first + key);
                s[key * count + v] = score = NAME(choose)((at >= low[v]) & (at < high[v]), score, hidden);
            }
            m = NAME(choose)(score > m, score, m);
        }
        most[v] = m;
        scale[v] = NAME(power)(stats[v] - m);
        sum[v] = stats[count + v] * scale[v];
    }
    for (int64_t key = 0; key < end - first; key++)
        for (int64_t x = 0; x < c->value_width; x += 16)
            __builtin_prefetch(values + key * c->kept_value_row + x);
    for (int64_t key = 0; key < end - first; key++)
        UNROLL for (int v = 0; v < count; v++) {
            VECTOR share = NAME(power)(s[key * count + v] - most[v]);
            s[key * count + v] = share;
            sum[v] += share;
        }
    UNROLL for (int v = 0; v < count; v++) {
        stats[v] = most[v];
        stats[count + v] = sum[v];
    }
    NAME(add_values)(ot, scale, s, values, c->kept_value_row, end - first, c->value_width, count);
}

/* A tile of the task's rows, as it is kept from one block of keys to the next. */
typedef struct {
    VECTOR *qt, *ot, *stats;
    int64_t row, rows;                      /* among the task's */
    int64_t low, high, all_low, all_high;   /* keys that any of its rows sees, and keys that all of them see */
    int count;
} NAME(Tile);

/* Row r of the task, among the part's places; `low` and `high` as above. */
TARGET static int64_t NAME(sight)(const Task *task, int64_t r, int64_t *low, int64_t *high)
{
    const Call *c = task->call;
    const Place *place = &c->places[task->part->first + (task->row + r) / c->group];
    int64_t here = place->position - task->part->at + 1;
    *low = c->window && here > c->window ? here - c->window : 0;
    *high = here < task->part->count ? here : task->part->count;
    return place->row;
}

TARGET static void NAME(attend_block)(const Task *task, const NAME(Tile) *tile, VECTOR *s, WHOLE *edges, int64_t first, int64_t end)
{
    WHOLE *low = 0, *high = 0;
    if (first < tile->all_low || end > tile->all_high) {
        int32_t *lows = (int32_t *)edges, *highs = (int32_t *)(edges + tile->count);
        for (int64_t r = 0; r < tile->count * LANES; r++) {
            int64_t from, to;
            NAME(sight)(task, tile->row + (r < tile->rows ? r : tile->rows - 1), &from, &to);
            lows[r] = (int32_t)from, highs[r] = (int32_t)to;
        }
        low = edges, high = edges + tile->count;
    }
    if (tile->count == 3)
        NAME(block)(task, tile->ot, tile->stats, s, tile->qt, low, high, first, end, 3);
    else if (tile->count == 2)
        NAME(block)(task, tile->ot, tile->stats, s, tile->qt, low, high, first, end, 2);
    else
        NAME(block)(task, tile->ot, tile->stats, s, tile->qt, low, high, first, end, 1);
}

/* Pack the rows of a tile, transposed and scaled for powers of two; lanes without a row are zeros. */
TARGET static void NAME(pack)(const Task *task, NAME(Tile) *tile)
{
    const Call *c = task->call;
    const int64_t lanes = tile->count * LANES, width = c->key_width;
    const float scale = (float)(c->scale * M_LOG2E);
    float *qt = (float *)tile->qt;
    if (tile->rows < lanes)
        memset(qt, 0, width * lanes * sizeof *qt);
    memset(tile->ot, 0, c->value_width * lanes * sizeof *qt);
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t low, high, row = NAME(sight)(task, tile->row + r, &low, &high);
        int64_t head = task->head * c->group + (task->row + tile->row + r) % c->group;
        const float *q = c->query + head * c->query_head + row * c->query_row;
        for (int64_t x = 0; x < width; x++)
            qt[x * lanes + r] = q[x] * scale;
        tile->low = r && tile->low < low ? tile->low : low;
        tile->high = r && tile->high > high ? tile->high : high;
        tile->all_low = r && tile->all_low > low ? tile->all_low : low;
        tile->all_high = r && tile->all_high < high ? tile->all_high : high;
    }
    for (int v = 0; v < tile->count; v++) {
        tile->stats[v] = (VECTOR){0} - FLT_MAX;     /* finite: a row that has seen nothing yet rescales zeros by 1 */
        tile->stats[tile->count + v] = (VECTOR){0};
    }
}

TARGET static void NAME(attend)(const Task *task)
{
    const Call *c = task->call;
    NAME(Tile) tiles[ROWS / (3 * LANES)];
    VECTOR *memory = (VECTOR *)task->memory, *s = memory;
    WHOLE *edges = (WHOLE *)(s + KEYS * 3);
    int64_t count = 0, low = task->end_key, high = task->first_key;
    memory = s + KEYS * 3 + 6;
    for (int64_t row = 0; row < task->rows; row += 3 * LANES) {
        NAME(Tile) *tile = &tiles[count++];
        tile->row = row;
        tile->rows = task->rows - row < 3 * LANES ? task->rows - row : 3 * LANES;
        tile->count = (int)((tile->rows + LANES - 1) / LANES);
        tile->qt = memory;
        tile->ot = tile->qt + tile->count * c->key_width;
        tile->stats = tile->ot + tile->count * c->value_width;
        memory = tile->stats + 2 * tile->count;
        NAME(pack)(task, tile);
        low = tile->low < low ? tile->low : low;
        high = tile->high > high ? tile->high : high;
    }
    low = low > task->first_key ? low : task->first_key;
    high = high < task->end_key ? high : task->end_key;
    for (int64_t first = low; first < high; first += KEYS) {
        int64_t end = first + KEYS < high ? first + KEYS : high;
        for (int64_t i = 0; i < count; i++)
            if (first < tiles[i].high && end > tiles[i].low)
                NAME(attend_block)(task, &tiles[i], s, edges, first, end < tiles[i].high ? end : tiles[i].high);
    }
    for (int64_t i = 0; i < count; i++) {
        const NAME(Tile) *tile = &tiles[i];
        const int64_t lanes = tile->count * LANES;
        const float *ot = (const float *)tile->ot, *stats = (const float *)tile->stats;
        for (int64_t r = 0; r < tile->rows; r++) {
            float *sums = task->sums + (tile->row + r) * c->value_width, *weights = task->weights[tile->row + r];
            for (int64_t x = 0; x < c->value_width; x++)
                sums[x] = ot[x * lanes + r];
            weights[0] = stats[r], weights[1] = stats[lanes + r];
        }
    }
}

#undef VECTOR
#undef WHOLE
#undef INLINE
#undef UNROLL
#undef TARGET
#undef NAME
#undef LANES
#undef TILE
