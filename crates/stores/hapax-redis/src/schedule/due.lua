-- Loads entries that are due, earliest first.
--
-- KEYS     entries, then due:QUEUE for each queue
-- ARGV[1]  limit of entries
-- ARGV[2]  bytes of notes after which there is no further one
--
-- Returns the first key, the time, the due time of the first entry that was left out (nil if there is
-- none), and for each entry its member, its due time and its value.
local limit, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local further
local function later(due)
  if due and not (further and further <= due) then
    further = due
  end
end

local found, missing = {}, 0

-- Adds the first entries of a queue that are due. Returns the due time of the next one, which may be nil.
-- Members without an entry do not count toward the limit, so that they hide no entry.
local function read(key)
  local count, from = 0, 0
  while true do
    local range = redis.call('ZRANGEBYSCORE', key, '-inf', digits(now), 'WITHSCORES', 'LIMIT',
      digits(from), digits(limit + 1))
    for at = 1, #range, 2 do
      local member, due = range[at], tonumber(range[at + 1])
      local exists, failed = call('HEXISTS', KEYS[1], member)
      if failed then
        return nil, failed
      end
      if missing == MAX_MISSING or exists == 1 and count == limit then
        return due
      elseif exists == 1 then
        count = count + 1
        from = from + 1
        table.insert(found, {member, due})
      else
        missing = missing + 1
        from = from + (drop(key, member) and 0 or 1)
      end
    end
    if #range <= 2 * limit then
      local rest = redis.call('ZRANGEBYSCORE', key, '(' .. digits(now), '+inf', 'WITHSCORES',
        'LIMIT', '0', '1')
      return tonumber(rest[2])
    end
  end
end

for number = 2, #KEYS do
  local first, failed = call('ZRANGE', KEYS[number], 0, 0, 'WITHSCORES')
  if failed then
    return failed
  end
  local due = tonumber(first[2])
  if due and due <= now then
    due, failed = read(KEYS[number])
    if failed then
      return failed
    end
  end
  later(due)
end

-- Strings are compared by bytes: Lua's own comparison uses the server's locale.
local function precedes(one, other)
  for at = 1, #one do
    local byte, against = string.byte(one, at), string.byte(other, at)
    if byte ~= against then
      return byte < (against or 0)
    end
  end
  return false
end
if #KEYS > 2 then
  table.sort(found, function(one, other)
    if one[2] == other[2] then
      return precedes(one[1], other[1])
    end
    return one[2] < other[2]
  end)
end

local entries, count, size = {}, 0, 0
for _, entry in ipairs(found) do
  if count == limit or size >= bytes then
    later(entry[2])
    break
  end
  local value, failed = call('HGET', KEYS[1], entry[1])
  if failed then
    return failed
  end
  count = count + 1
  size = size + #value
  entries[3 * count - 2] = entry[1]
  entries[3 * count - 1] = digits(entry[2])
  entries[3 * count] = value
end
return {KEYS[1], digits(now), further and digits(further) or false, entries}
